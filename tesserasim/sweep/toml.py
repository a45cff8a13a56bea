"""Strict reading of TOML: keys are known, values have their type and range, errors name their key."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tesserasim.errors import InputError

MAX_FILE_BYTES = 1 << 20
MAX_LIST = 1000


def read_toml(path: Path, what: str) -> dict[str, Any]:
    """The file as a dict; InputError in one line for anything that is not a TOML file of sensible size."""
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_FILE_BYTES + 1)
    except FileNotFoundError:
        raise InputError(f"{path}: no such {what} file") from None
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from None
    if len(raw) > MAX_FILE_BYTES:
        raise InputError(f"{path}: larger than 1 MiB, so not a {what} file")
    try:
        return tomllib.loads(raw.decode("utf-8-sig"))
    except UnicodeDecodeError:
        raise InputError(f"{path}: not UTF-8 text, so not a {what} file") from None
    except RecursionError:
        raise InputError(f"{path}: nested too deeply to be a {what} file") from None
    except ValueError as error:
        first = (str(error).splitlines() or ["unreadable"])[0]
        raise InputError(f"{path}: not valid TOML ({first})") from None


def did_you_mean(word: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(word, known, n=1)
    return f"; did you mean {near[0]!r}?" if near else f"; known: {', '.join(known)}"


class Table:
    """One TOML table being read: `take_…` removes a key, `finish` refuses what is left."""

    def __init__(self, data: Any, where: str) -> None:
        if not isinstance(data, dict):
            raise InputError(f"{where}: must be a table, not {_kind(data)}")
        self._data = dict(data)
        self._known: list[str] = []
        self.where = where

    def _take(self, key: str) -> Any:
        self._known.append(key)
        return self._data.pop(key, None)

    def fail(self, key: str, problem: str) -> InputError:
        return InputError(f"{self.where}: {key} {problem}")

    def take(self, key: str) -> Any:
        """The raw value, None if absent."""
        return self._take(key)

    def text(self, key: str, default: str | None = None, choices: Sequence[str] = ()) -> str:
        value = self._take(key)
        if value is None:
            if default is None:
                raise InputError(f"{self.where}: key {key!r} is missing")
            return default
        if not isinstance(value, str) or not value or not value.isprintable():
            raise self.fail(key, f"must be a non-empty line of text, not {_kind(value)}")
        if choices and value not in choices:
            raise self.fail(key, f"is {value!r}{did_you_mean(value, choices)}")
        return value

    def integer(self, key: str, default: int | None, low: int, high: int) -> int | None:
        value = self._take(key)
        return default if value is None else self._integer(key, value, low, high)

    def boolean(self, key: str, default: bool) -> bool:
        value = self._take(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.fail(key, f"must be true or false, not {_kind(value)}")
        return value

    def integers(self, key: str, default: Sequence[int], low: int, high: int) -> tuple[int, ...]:
        values = self._list(key)
        if values is None:
            return tuple(default)
        return self._distinct(key, [self._integer(key, v, low, high) for v in values])

    def texts(self, key: str, default: Sequence[str] | None, choices: Sequence[str] = ()) -> tuple[str, ...]:
        values = self._list(key)
        if values is None:
            if default is None:
                raise InputError(f"{self.where}: key {key!r} is missing")
            return tuple(default)
        for v in values:
            if not isinstance(v, str) or not v or not v.isprintable():
                raise self.fail(key, f"must hold lines of text, not {_kind(v)}")
            if choices and v not in choices:
                raise self.fail(key, f"holds {v!r}{did_you_mean(v, choices)}")
        return self._distinct(key, values)

    def finish(self) -> None:
        for key in self._data:
            raise InputError(f"{self.where}: unknown key {key!r}{did_you_mean(key, self._known)}")

    def _integer(self, key: str, value: Any, low: int, high: int) -> int:
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.fail(key, f"must be a whole number, not {_kind(value)}")
        if not low <= value <= high:
            raise self.fail(key, f"must lie between {low} and {high}, not {value}")
        return value

    def _list(self, key: str) -> list[Any] | None:
        values = self._take(key)
        if values is None:
            return None
        if not isinstance(values, list) or not values:
            raise self.fail(key, "must be a list with at least one entry")
        if len(values) > MAX_LIST:
            raise self.fail(key, f"has {len(values)} entries, more than {MAX_LIST}")
        return values

    def _distinct(self, key: str, values: Sequence[Any]) -> tuple[Any, ...]:
        if len(set(values)) != len(values):
            raise self.fail(key, "names something twice")
        return tuple(values)


def _kind(value: Any) -> str:
    shown = repr(value)
    return shown if len(shown) <= 40 else f"{shown[:37]}..."
