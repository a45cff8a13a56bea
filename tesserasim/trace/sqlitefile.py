"""SQLite files of other programs, opened so that nothing is ever written beside them.

`immutable=1` promises SQLite that nobody changes the file: it takes no lock and makes no journal, so profiles on
read-only and on network file systems open too. The price: a write-ahead log beside the file is not read.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from urllib.parse import quote

from tesserasim.errors import InputError

#: A row takes at least this many bytes of the file; more rows than that come from damaged pages.
_BYTES_PER_ROW = 4


@contextmanager
def opened(where: str) -> Iterator[sqlite3.Connection]:
    """A connection for reading; whatever SQLite finds wrong inside the block is an InputError of one line."""
    try:
        name = quote(os.fsencode(os.path.abspath(where)))
        with closing(sqlite3.connect(f"file:{name}?mode=ro&immutable=1", uri=True)) as database:
            database.text_factory = _text
            database.execute("PRAGMA trusted_schema = OFF")
            yield database
    except (sqlite3.Error, OverflowError, ValueError, MemoryError) as error:
        reason = " ".join(str(error).split())[:200]
        raise InputError(f"{where}: damaged SQLite database ({reason}); export it again") from None


def tables(where: str) -> set[str]:
    """Names of the tables (never views: they could compute anything). Raises InputError if it is damaged."""
    with opened(where) as database:
        return table_names(database)


def table_names(database: sqlite3.Connection) -> set[str]:
    rows = database.execute("SELECT name FROM sqlite_master WHERE type = 'table' AND sql NOT LIKE 'CREATE VIRTUAL%'")
    return {name for (name,) in rows if isinstance(name, str)}


def columns(database: sqlite3.Connection, table: str) -> set[str]:
    """Names of the columns of `table`, which must be one of `table_names`."""
    rows = database.execute(f'PRAGMA table_info("{table}")')  # a fixed name of ours, never the file's
    return {row[1] for row in rows if isinstance(row[1], str)}


def select(
    database: sqlite3.Connection, table: str, wanted: tuple[str, ...], limit: int
) -> Iterator[tuple[object, ...]]:
    """The `wanted` columns of every row in the order of the file, None for a column that this version lacks.

    `limit`: the size of the file in bytes, from which follows how many rows it can hold.
    """
    have = columns(database, table)
    chosen = ", ".join(f'"{name}"' if name in have else "NULL" for name in wanted)
    for count, row in enumerate(database.execute(f'SELECT {chosen} FROM "{table}"')):
        if count > limit // _BYTES_PER_ROW:
            raise sqlite3.DatabaseError("more rows than the file has room for")
        yield row


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", "replace")
