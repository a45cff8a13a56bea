"""Whatever is done to a small profile, importing it gives a trace or one of our errors, never another."""

from __future__ import annotations

import copy
import gzip
import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from import_checks import import_and_check
from kineto_cases import SMALL

pytestmark = pytest.mark.quick
CONTENT = SMALL.read_bytes()
DOCUMENT = json.loads(CONTENT)
PACKED = gzip.compress(CONTENT, mtime=0)

ODD = [0, -1, 2**31, 2**63, 10**30, "1e999", "-0.0", "stream 7", "", "[1,2,3]"]
numbers = st.one_of(st.integers(), st.floats(), st.sampled_from(ODD))
values = st.recursive(
    st.one_of(st.none(), st.booleans(), numbers, st.text(st.characters(), max_size=8)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=4), inner, max_size=3)),
    max_leaves=4,
)


def check(content: bytes, through_parquet: bool = False) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "profile.json"
        path.write_bytes(content)
        import_and_check(path, through_parquet)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_mutated_bytes(data: st.DataObject) -> None:
    """Mutation tried: `except zlib.error` taken out of `source._gunzip` → fails."""
    base = data.draw(st.sampled_from([CONTENT, PACKED]))
    content = bytearray(base)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(content)))
        size = data.draw(st.sampled_from([0, 0, 1, 2, 30, 400]))
        content[at : at + size] = data.draw(st.one_of(st.binary(max_size=4), st.sampled_from([b'"', b"{", b"]", b","])))
    check(bytes(content))


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_mutated_values(data: st.DataObject) -> None:
    """Any value anywhere; what loads also goes through Parquet and back unchanged.

    Mutation tried: `_Ids` hands on any integer → a stream of 2^63 does not fit its column, fails.
    """
    document = copy.deepcopy(DOCUMENT)
    places = [document, *document["traceEvents"]]
    for _ in range(data.draw(st.integers(1, 3))):
        target: Any = data.draw(st.sampled_from(places))
        if isinstance(target.get("args"), dict) and data.draw(st.booleans()):
            target = target["args"]
        key = data.draw(st.sampled_from(sorted(target) or ["ts"]))
        target[key] = data.draw(values)
    check(json.dumps(document).encode(), through_parquet=True)
