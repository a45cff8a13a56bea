"""Pieces of Chrome trace events that every writer of them shares."""

from __future__ import annotations

import json


def us(ns: int) -> str:
    """Nanoseconds as decimal microseconds with three digits: 1234567 -> "1234.567"."""
    sign = "-" if ns < 0 else ""
    return f"{sign}{abs(ns) // 1000}.{abs(ns) % 1000:03d}"


def metadata(kind: str, process: int, thread: int, name: str) -> str:
    """The event that names a process or a thread."""
    return f'{{"ph":"M","pid":{process},"tid":{thread},"name":"{kind}","args":{{"name":{json.dumps(name)}}}}}'
