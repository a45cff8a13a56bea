"""Chrome-trace JSON as a stream of events: constant memory, times as text, errors with a position.

Two things make `json.load` unfit for profiles. A time such as `1712195495505582.988` (µs since 1970 with
nanoseconds behind the point) does not fit a float, so decimals are handed on as text. And most of a large
profile is CPU and Python rows that nobody here looks at, so events are parsed one by one and dropped.

Tolerated: a byte-order mark, raw control characters inside strings, bytes that are not UTF-8 (`bad_utf8`
is set), and, in a bare array only, a missing end (legal in Chrome's format; `unclosed` is set). Everything
else that is not JSON raises InputError with file, line and column.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Collection, Iterator
from typing import Any

from tesserasim.errors import InputError

_SPACE = re.compile(r"[ \t\r\n]*")
_COMMA = re.compile(r"[ \t\r\n]*,[ \t\r\n]*")
#: How `surrogateescape` spells a byte that is not UTF-8.
_BAD_BYTE = re.compile("[\udc80-\udcff]")
#: Characters read ahead at least; a value that does not fit makes the window grow.
WINDOW = 1 << 18
#: One JSON value (an event) larger than this is refused instead of filling the memory.
VALUE_LIMIT = 1 << 28
#: An error this far from the end of the window is an error of the text, not of the window.
_MARGIN = 1 << 16


class EventStream:
    """Iterate over the events of one trace document: `{"traceEvents": [...], ...}` or a bare array.

    `where` names the file in errors; `pieces` yields its bytes. Of the other top-level values those named
    in `keep` are found in `header` afterwards; `keys` lists all top-level names in order.
    """

    def __init__(self, where: str, pieces: Iterator[bytes], keep: Collection[str] = ()) -> None:
        self.where = where
        self.keep = frozenset(keep)
        self.header: dict[str, Any] = {}
        self.keys: list[str] = []
        self.bare_array = False
        self.unclosed = False
        self.bad_utf8 = False
        self._pieces = pieces
        self._utf8 = codecs.getincrementaldecoder("utf-8")("surrogateescape")
        self._decode = json.JSONDecoder(strict=False, parse_float=str, parse_constant=_no_number).raw_decode
        self._buffer = ""
        self._at = 0
        self._line, self._column = 1, 1  # of the buffer's first character
        self._ended = False

    def __iter__(self) -> Iterator[Any]:
        self._more()
        if self._buffer.startswith("\ufeff"):
            self._at = 1
        first = self._peek()
        if first == "[":
            self.bare_array = True
            yield from self._array()
        elif first == "{":
            yield from self._object()
        elif first:
            raise self._error("not JSON: expected '{' or '['")
        else:
            raise InputError(f"{self.where}: empty file; export the profile again")
        if self._peek():
            raise self._error("text after the end of the JSON document")

    def _object(self) -> Iterator[Any]:
        self._at += 1
        if self._peek() == "}":
            self._at += 1
            return
        while True:
            if self._peek() != '"':
                raise self._error("expected a name in double quotes")
            key = self._value()
            self.keys.append(key)
            self._take(":")
            if key == "traceEvents" and self._peek() == "[":
                yield from self._array()
            else:
                self._peek()
                value = self._value()
                if key in self.keep:
                    self.header[key] = value
            if self._peek() == "}":
                self._at += 1
                return
            self._take(",")

    def _array(self) -> Iterator[Any]:
        self._at += 1
        if self._peek() == "]":
            self._at += 1
            return
        while True:
            if self.bare_array and not self._peek():
                self.unclosed = True
                return
            yield self._value()
            comma = _COMMA.match(self._buffer, self._at)
            if comma and comma.end() < len(self._buffer):  # the quick way; else near the window's end
                self._at = comma.end()
                continue
            if self._peek() == "]":
                self._at += 1
                return
            if not self._peek() and self.bare_array:
                self.unclosed = True
                return
            self._take(",")
            self._peek()

    def _peek(self) -> str:
        """Skip white space; the next character, "" at the end of the file."""
        while True:
            space = _SPACE.match(self._buffer, self._at)
            assert space is not None  # the pattern matches the empty string
            self._at = space.end()
            if self._at < len(self._buffer):
                return self._buffer[self._at]
            if not self._more():
                return ""

    def _take(self, character: str) -> None:
        if self._peek() != character:
            raise self._error(f"expected {character!r}")
        self._at += 1

    def _value(self) -> Any:
        """Parse the value at the current position, reading on as long as it is incomplete."""
        while True:
            try:
                value, end = self._decode(self._buffer, self._at)
            except json.JSONDecodeError as error:
                open_string = error.msg.startswith("Unterminated string")
                if (open_string or error.pos > len(self._buffer) - _MARGIN) and self._more():
                    continue
                raise self._error(error.msg, error.pos, open_string) from None
            except RecursionError:
                raise self._error("nested too deeply") from None
            except ValueError:  # Python refuses integers of thousands of digits
                raise self._error("a number with too many digits") from None
            if end == len(self._buffer) and self._more():  # a number may go on in the next piece
                continue
            self._at = end
            return value

    def _more(self) -> bool:
        """Drop what was parsed and read on; False at the end of the file."""
        if self._ended:
            return False
        rest = len(self._buffer) - self._at
        if rest > VALUE_LIMIT:
            raise self._error(f"one value is larger than {VALUE_LIMIT >> 20} MiB; cut the profile down")
        parts, have = [], 0
        while not self._ended and have < max(WINDOW, rest):  # doubling keeps repeated parsing linear
            piece = next(self._pieces, None)
            text = self._utf8.decode(piece or b"", final=piece is None)
            if not self.bad_utf8 and not text.isascii() and _BAD_BYTE.search(text):
                self.bad_utf8 = True
            parts.append(text)
            have += len(text)
            self._ended = piece is None
        if not have:
            return False  # positions stay valid
        self._line, self._column = self._position(self._at)
        self._buffer, self._at = self._buffer[self._at :] + "".join(parts), 0
        return True

    def _position(self, index: int) -> tuple[int, int]:
        """Line and column, from 1, of a character of the buffer."""
        lines = self._buffer.count("\n", 0, index)
        if not lines:
            return self._line, self._column + index
        return self._line + lines, index - self._buffer.rfind("\n", 0, index)

    def _error(self, message: str, index: int | None = None, open_string: bool = False) -> InputError:
        at = self._at if index is None else index
        line, column = self._position(at)
        if self._ended and (open_string or not self._buffer[at:].strip()):
            message = "the file ends in the middle of the JSON (truncated?)"
        return InputError(f"{self.where}:{line}:{column}: not valid JSON: {message}; export the profile again")


def _no_number(_: str) -> None:
    """NaN and Infinity are no times and no counts."""
