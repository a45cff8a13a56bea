"""Strict reading of a table: keys are known, values have their type and range, errors name their key."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tesserasim.errors import InputError
from tesserasim.files import did_you_mean, shown

MAX_LIST = 1000


class Table:
    """One TOML table being read: `take_…` removes a key, `finish` refuses what is left."""

    def __init__(self, data: Any, where: str) -> None:
        if not isinstance(data, dict):
            raise InputError(f"{where}: must be a table, not {shown(data)}")
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
            raise self.fail(key, f"must be a non-empty line of text, not {shown(value)}")
        if choices and value not in choices:
            raise self.fail(key, f"is {shown(value)}{did_you_mean(value, choices)}")
        return value

    def integer(self, key: str, default: int | None, low: int, high: int) -> int | None:
        value = self._take(key)
        return default if value is None else self._integer(key, value, low, high)

    def boolean(self, key: str, default: bool) -> bool:
        value = self._take(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.fail(key, f"must be true or false, not {shown(value)}")
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
                raise self.fail(key, f"must hold lines of text, not {shown(v)}")
            if choices and v not in choices:
                raise self.fail(key, f"holds {shown(v)}{did_you_mean(v, choices)}")
        return self._distinct(key, values)

    def finish(self) -> None:
        for key in self._data:
            raise InputError(f"{self.where}: unknown key {shown(key)}{did_you_mean(key, self._known)}")

    def _integer(self, key: str, value: Any, low: int, high: int) -> int:
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.fail(key, f"must be a whole number, not {shown(value)}")
        if not low <= value <= high:
            raise self.fail(key, f"must lie between {low} and {high}, not {shown(value)}")
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
            twice = next(value for i, value in enumerate(values) if value in values[:i])
            raise self.fail(key, f"names {shown(twice)} twice")
        return tuple(values)
