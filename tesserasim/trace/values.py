"""Values as exporters write them: numbers, numbers in quotes, "stream 7", lists in quotes, or nothing.

Every function returns None for what is no such value; none of them raises.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from decimal import ROUND_FLOOR, Context, Decimal, InvalidOperation
from typing import Any

_PLAIN = re.compile(r"(\d{1,18})(?:\.(\d*))?", re.ASCII)
_INTEGER = re.compile(r"[+-]?\d{1,20}(?:\.0*)?", re.ASCII)
_LAST_NUMBER = re.compile(r"(\d{1,18})\s*$", re.ASCII)
_DIGITS = re.compile(r"\d+")
_EXACT = Context(prec=100)
#: Times and durations beyond this many ns (36 and 146 years) are damage, and would not fit a 64-bit column.
DURATION_LIMIT = 1 << 60
TIME_LIMIT = 1 << 62


def ns_of_us(value: Any) -> int | None:
    """Nanoseconds of a decimal number of µs, exactly; finer digits are rounded half up.

    >>> ns_of_us("1712195495505582.988")
    1712195495505582988
    """
    if type(value) is int:
        return value * 1000
    if not isinstance(value, str):
        return None
    text = value.strip()
    plain = _PLAIN.fullmatch(text)
    if plain:
        fraction = ((plain[2] or "") + "0000")[:4]
        return int(plain[1]) * 1000 + int(fraction[:3]) + (fraction[3] >= "5")
    return scaled(text, 1000)


def scaled(text: str, factor: int) -> int | None:
    """A decimal number times `factor`, exactly; what is finer than 1 is rounded half up.

    >>> scaled("0.033", 10**6)
    33000
    """
    if len(text) > 64:
        return None
    try:
        number = Decimal(text)
        if not number.is_finite() or number.adjusted() > 20:
            return None
        half_up = _EXACT.add(_EXACT.multiply(number, Decimal(factor)), Decimal("0.5"))
        return int(half_up.to_integral_value(ROUND_FLOOR, _EXACT))
    except (InvalidOperation, ValueError):
        return None


def integer(value: Any) -> int | None:
    """A whole number, also in quotes or written as 7.0."""
    if type(value) is int:
        return value
    if isinstance(value, str):
        text = value.strip()
        if _INTEGER.fullmatch(text):
            return int(text.partition(".")[0])
    return None


def label(value: Any) -> int | str | None:
    """A stream, device or thread: a number where there is one ("stream 7" is 7), else its text."""
    number = integer(value)
    if number is not None:
        return number
    if isinstance(value, str) and value.strip():
        last = _LAST_NUMBER.search(value)
        return int(last[1]) if last else value.strip()
    return None


def triple(value: Any) -> tuple[int, int, int]:
    """Grid or block: three numbers, also as text "[99,1,1]"; (0, 0, 0) if unknown or beyond 32 bits."""
    if isinstance(value, str):
        value = re.findall(r"\d{1,18}", value[:100])
    if isinstance(value, list) and len(value) == 3:
        x, y, z = (integer(v) for v in value)
        if x is not None and y is not None and z is not None and all(0 <= v < 1 << 31 for v in (x, y, z)):
            return x, y, z
    return 0, 0, 0


def count(value: Any) -> int:
    """A number of bytes or registers; 0 if unknown, negative or absurd."""
    number = integer(value)
    return number if number is not None and 0 <= number < 1 << 62 else 0


def counted(number: int, noun: str) -> str:
    """"1 row", "2 rows"."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def alike(lines: Iterable[str]) -> list[str]:
    """Lines that differ in their numbers alone as the first of them and how many more there are."""
    first: dict[str, str] = {}
    times: Counter[str] = Counter()
    for line in lines:
        pattern = _DIGITS.sub("0", line)
        first.setdefault(pattern, line)
        times[pattern] += 1
    return [line + (f" (and {times[p] - 1} more like it)" if times[p] > 1 else "") for p, line in first.items()]


def text_of(value: Any) -> str:
    """Text fit for UTF-8: bytes that were none, and unpaired surrogates, become U+FFFD."""
    if not isinstance(value, str):
        return ""
    if value.isascii():
        return value
    return value.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
