"""FLOPs and bytes of captured calls, against sums written out."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")
pytest.importorskip("cuda.bindings")
from hw.capture.classify import bytes_of, flops_of
from tesserasim.trace.model import Access, Buffer

pytestmark = pytest.mark.quick

ATTENTION = {"batch": 2, "heads": 3, "head_dim": 5, "kv_heads": 1}


@pytest.mark.parametrize(("queries", "keys"), [(7, 7), (4, 11), (1, 9)])
def test_causal_attention_counts_the_keys_that_each_query_sees(queries: int, keys: int) -> None:
    """A chunk on a past sees all of the past. Mutation tried: half of the square."""
    seen = sum(keys - queries + i + 1 for i in range(queries))
    shape = ATTENTION | {"seq_q": queries, "seq_kv": keys}
    assert flops_of("attention_prefill", shape, causal=True) == 2 * 2 * 2 * 3 * 5 * seen
    assert flops_of("attention_prefill", shape, causal=False) == 2 * 2 * 2 * 3 * 5 * queries * keys


def test_cross_attention_is_not_causal() -> None:
    """More queries than keys: no order between them. Mutation tried: without `kv >= q`."""
    shape = ATTENTION | {"seq_q": 8, "seq_kv": 4}
    assert flops_of("attention_prefill", shape, causal=True) == 4 * 2 * 3 * 5 * 32


def _access(buffer: int, mode: str, first: int, nbytes: int) -> Access:
    return Access(buffer, mode, first, nbytes, "exact", False, "schema")


BUFFERS = [Buffer(0, "a", 1000, "activation", 0), Buffer(1, "w", 640, "weight", 1), Buffer(2, "s", 99, "workspace", 2)]


def test_bytes_that_two_accesses_share_count_once() -> None:
    """Mutation tried: the plain sum (190 read, 120 written)."""
    rows = [_access(0, "RW", 0, 100), _access(0, "R", 50, 90), _access(0, "W", 80, 20), _access(2, "RW", 0, 99)]
    assert bytes_of(rows, BUFFERS) == (140, 100)


def test_experts_that_were_not_chosen_are_not_read() -> None:
    rows = [_access(0, "R", 0, 64), _access(1, "R", 0, 640), _access(0, "W", 64, 64)]
    assert bytes_of(rows, BUFFERS, weight_share=0.25) == (64 + 160, 64)


def test_a_gather_reads_no_more_of_a_table_than_it_moves() -> None:
    rows = [_access(0, "R", 0, 8), _access(1, "R", 0, 640), _access(0, "W", 64, 64)]
    assert bytes_of(rows, BUFFERS, gathers=True) == (8 + 64, 64)
