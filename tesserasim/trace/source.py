"""The bytes of a profile: plain or gzip, decided by content, read in pieces.

A gzip file may hold several members (their contents are joined, as `cat a.gz b.gz` makes them). Whatever
else goes wrong inside one, a cut end, damaged data, bytes after the last member, is an `InputError` that
says so: reading on would give a profile with kernels missing.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator
from typing import BinaryIO

from tesserasim.errors import InputError
from tesserasim.files import check_regular

GZIP_MAGIC = b"\x1f\x8b"
#: Bytes read from the file at once. Small, because deflate can grow a piece a thousandfold.
PIECE = 1 << 16


def pieces(path: str | os.PathLike[str]) -> Iterator[bytes]:
    """Yield the content of `path` in pieces, decompressed if it is gzip; never an empty piece.

    Raises InputError if the file cannot be opened or its gzip layer is broken.
    """
    where = os.fspath(path)
    if os.path.exists(where) and not os.path.isdir(where):
        check_regular(where, "profile")  # a pipe would wait, and a profile is read more than once
    try:
        with open(where, "rb") as file:
            first = file.read(PIECE)
            if first.startswith(GZIP_MAGIC):
                yield from _gunzip(where, file, first)
            else:
                while first:
                    yield first
                    first = file.read(PIECE)
    except FileNotFoundError:
        raise InputError(f"{where}: no such file") from None
    except IsADirectoryError:
        raise InputError(f"{where}: is a directory; name one profile inside it") from None
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise InputError(f"{where}: cannot be read ({reason})") from None


def head(path: str | os.PathLike[str], nbytes: int) -> bytes:
    """The first `nbytes` bytes of the (decompressed) content; fewer if there are no more."""
    parts, have = [], 0
    for piece in pieces(path):
        parts.append(piece)
        have += len(piece)
        if have >= nbytes:
            break
    return b"".join(parts)[:nbytes]


def is_gzip(path: str | os.PathLike[str]) -> bool:
    """Whether the file itself starts like gzip. Raises OSError if it cannot be opened."""
    with open(path, "rb") as file:
        return file.read(2) == GZIP_MAGIC


def _gunzip(where: str, file: BinaryIO, data: bytes) -> Iterator[bytes]:
    """Decompress the members of a gzip file that starts with `data`."""
    member = zlib.decompressobj(wbits=31)
    while True:
        try:
            content = member.decompress(data)
        except zlib.error as error:
            raise InputError(f"{where}: damaged gzip data ({error}); export or copy the file again") from None
        if content:
            yield content
        if not member.eof:
            data = file.read(PIECE)
            if not data:
                raise InputError(f"{where}: gzip data ends early (truncated file); export or copy it again")
            continue
        data = _next_member(where, file, member.unused_data)
        if not data:
            return
        member = zlib.decompressobj(wbits=31)


def _next_member(where: str, file: BinaryIO, rest: bytes) -> bytes:
    """Bytes of the next member, or nothing at the end of the file. Zero padding is allowed, junk is not."""
    rest = rest.lstrip(b"\0")
    while len(rest) < len(GZIP_MAGIC):
        more = file.read(PIECE)
        if not more:
            break
        rest = (rest + more).lstrip(b"\0")
    if rest and not rest.startswith(GZIP_MAGIC):
        raise InputError(f"{where}: bytes that are not gzip follow the compressed data; cut them off")
    return rest
