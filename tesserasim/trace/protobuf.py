"""Just enough of the protobuf wire format to tell two kinds of file from each other and from noise."""

from __future__ import annotations

import re
from collections.abc import Iterator

_NAME = re.compile(rb"[\x20-\x7e]{1,500}")
_VERSION = re.compile(rb"\d+\.\d+(\.\d+)*[\w.+-]*")
_PLANE = re.compile(rb"/|Task Environment|#Chip")


def is_xplane(head: bytes) -> bool:
    """XSpace: `repeated XPlane planes = 1`, and a plane starts with an id (1) and a name (2)."""
    if head[:1] != b"\x0a":
        return False
    size, at = _varint(head, 1)
    for field, value in _fields(head[at : at + size] if size > 0 else b""):
        if field == 2 and isinstance(value, bytes):
            return bool(_PLANE.match(value))
        if field != 1:
            return False
    return False


def is_chakra(head: bytes) -> bool:
    """Chakra .et: length-prefixed messages, first a GlobalMetadata (1: version), then nodes (2: name)."""
    messages: list[dict[int, int | bytes]] = []
    at = 0
    while at < len(head) and len(messages) < 3:
        size, at = _varint(head, at)
        if size < 0 or at + size > len(head):
            break
        messages.append(dict(_fields(head[at : at + size])))
        at += size
    if not messages:
        return False
    version = messages[0].get(1)
    if isinstance(version, bytes) and _VERSION.fullmatch(version):
        return True
    names = [m.get(2) for m in messages]
    return len(messages) > 1 and all(isinstance(n, bytes) and bool(_NAME.fullmatch(n)) for n in names[1:])


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """Value and end of the varint at `at`; value -1 if there is none."""
    value = shift = 0
    while at < len(data) and shift < 64:
        byte = data[at]
        value |= (byte & 127) << shift
        at += 1
        if byte < 128:
            return value, at
        shift += 7
    return -1, at


def _fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Number and value of each field, up to the first that is cut or malformed."""
    at = 0
    while at < len(message):
        tag, at = _varint(message, at)
        wire = tag & 7
        if tag <= 0 or tag >> 3 == 0:
            return
        if wire == 0:
            value, at = _varint(message, at)
            if value < 0:
                return
            yield tag >> 3, value
            continue
        size = {1: 8, 5: 4}.get(wire, -1)
        if wire == 2:
            size, at = _varint(message, at)
        if size < 0:
            return
        yield tag >> 3, message[at : at + size]
        at += size
