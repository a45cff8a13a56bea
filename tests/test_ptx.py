"""What the PTX analysis must know: single facts, the command, damaged files, speed."""

from __future__ import annotations

import json
import re
from importlib import resources
from pathlib import Path

import jsonschema
import ptx_truth as truth
import pytest

from tesserasim.cli import main
from tesserasim.deps.ptx import modes
from tesserasim.errors import InputError

pytestmark = pytest.mark.quick
HEAD = ".version 8.7\n.target sm_90a\n.address_size 64\n"


def kernel(body: str, parameters: str = ".param .u64 a, .param .u64 b", before: str = "") -> dict[str, str]:
    """The answer for one entry; `a` is in %rd1 and `b` in %rd2."""
    text = (
        f"{HEAD}{before}.visible .entry k({parameters}) {{\n.reg .b64 %rd<20>; .reg .b32 %r<20>; .reg .pred %p<4>;\n"
        f"ld.param.u64 %rd1, [a]; ld.param.u64 %rd2, [b];\n{body}\nret; }}\n"
    )
    return modes(text)["k"]


@pytest.mark.parametrize(
    ("body", "want"),
    [
        ("ld.global.u32 %r1, [%rd1];", {"a": "R", "b": "none"}),
        ("st.global.u32 [%rd1], 1;", {"a": "W", "b": "none"}),
        ("atom.global.add.u32 %r1, [%rd1], 1;", {"a": "RW", "b": "none"}),
        ("and.b64 %rd3, %rd1, -16; ld.u32 %r1, [%rd3];", {"a": "R", "b": "none"}),
        ("mad.lo.s64 %rd3, %rd1, 1, 8; ld.u32 %r1, [%rd3];", {"a": "R", "b": "none"}),
        ("shl.b64 %rd3, %rd1, 8; shr.u64 %rd3, %rd3, 8; ld.u32 %r1, [%rd3];", {"a": "R", "b": "none"}),
        ("min.u64 %rd3, %rd1, %rd2; st.u32 [%rd3], 1;", {"a": "W", "b": "W"}),
        ("bfi.b64 %rd3, %rd1, %rd2, 0, 48; st.u32 [%rd3], 1;", {"a": "W", "b": "W"}),
        ("st.global.u64 [%rd1], %rd2; ld.global.u64 %rd3, [%rd1]; st.u32 [%rd3], 1;",
         {"a": "RW", "b": "unknown", "*": "unknown"}),  # what is loaded may be what was stored
        ("st.global.u64 [%rd1], %rd2;", {"a": "W", "b": "none"}),
        ("st.shared.u64 [%r2], %rd2; ld.global.u64 %rd3, [%rd1]; st.u32 [%rd3], 1;",
         {"a": "R", "b": "none", "*": "unknown"}),
        ("tensormap.replace.tile.global_address.shared::cta.b1024.b64 [%r2], %rd2;"
         "cp.async.bulk.tensor.1d.shared::cluster.global.mbarrier::complete_tx::bytes [%r2], [%rd1, {%r3}], [%r2];",
         {"a": "R", "b": "unknown", "*": "unknown"}),
        ("frobnicate.u32 %r1, [%rd1];", {"a": "unknown", "b": "none", "*": "unknown"}),
        ("frobnicate.u64 %rd3, %rd1; ld.u32 %r1, [%rd3];", {"a": "R", "b": "none"}),
        ("call missing, (%rd1);", {"a": "unknown", "b": "none", "*": "unknown"}),
        ("ld.shared.u32 %r1, [%r2]; mbarrier.inval.shared.b64 [%r2];", {"a": "none", "b": "none"}),
        ("mov.b64 {%r1, %r2}, %rd1; shfl.sync.idx.b32 %r1, %r1, 0, 31, -1; shfl.sync.idx.b32 %r2, %r2, 0, 31, -1;"
         "mov.b64 %rd3, {%r1, %r2}; st.u32 [%rd3], 1;", {"a": "W", "b": "none"}),
        ("L: ld.u32 %r1, [%rd1]; add.s64 %rd1, %rd1, 4; setp.ne.u32 %p1, %r1, 0; @%p1 bra L;", {"a": "R", "b": "none"}),
    ],
)  # fmt: skip
def test_facts(body: str, want: dict[str, str]) -> None:
    """Fails if a pointer that is put where memory without a name may lead is `none`, `min` keeps its first operand, a
    class is lost by `shr`, or unknown opcodes have no effect."""
    assert kernel(body) == want


def test_annotated_pointer_and_a_number_of_64_bits() -> None:
    marked = ".param .u64 .ptr .global .align 1 a, .param .u64 b"
    assert kernel("add.s64 %rd3, %rd1, %rd2; ld.u32 %r1, [%rd3];", marked) == {"a": "R", "b": "none"}
    # Either of them may be the base where one is chosen: the annotation proves nothing about the other.
    assert kernel("selp.b64 %rd3, %rd1, %rd2, %p1; ld.u32 %r1, [%rd3];", marked) == {"a": "R", "b": "R"}
    # new base + (old - old base): the difference of pointers moves another one.
    moved = "ld.global.u64 %rd4, [%rd1]; sub.s64 %rd3, %rd1, %rd4; add.s64 %rd3, %rd3, %rd2; st.u32 [%rd3], 1;"
    assert kernel(moved, marked)["b"] == "W"


def test_the_same_bytes_by_another_name_in_a_struct() -> None:
    body = "ld.param.v2.u64 {%rd3, %rd4}, [s+8]; ld.u32 %r1, [%rd3]; st.u32 [%rd4+4], %r1;"
    found = kernel(body, ".param .u64 a, .param .u64 b, .param .align 8 .b8 s[32]")
    assert found == {"a": "none", "b": "none", "s+8": "R", "s+16": "W"}


@pytest.mark.parametrize(
    ("text", "line"),
    [("", 1), ("hello", 1), (HEAD + ".visible .entry k(", 4), (HEAD + ".entry k() {\n ret;\n", 4),
     (HEAD + ".entry k() {\n ld.global.u32 %r1, [%rd1]\n ret; }", 5), (HEAD + ".entry k() { bra nowhere; }", 4),
     (HEAD + "/* open", 4), (HEAD + ".entry k() {\n .reg .b32 %r<2>;\n mov.u32 %r1, [[2]];\n}", 6)],
)  # fmt: skip
def test_malformed_files(text: str, line: int) -> None:
    """Fails if a missing semicolon is skipped silently."""
    with pytest.raises(InputError, match=rf"^bad\.ptx:{line}: .+$"):
        modes(text, "bad.ptx")


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "k.ptx"
    path.write_text((truth.DATA / "hand.ptx").read_text())
    assert main(["deps", str(path), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    schema = json.loads(resources.files("tesserasim").joinpath("schemas", "deps.json").read_text(encoding="utf-8"))
    jsonschema.validate(document, schema, cls=jsonschema.Draft202012Validator)
    assert document["packed"] == {"a": "R", "b": "W"}
    assert main(["deps", str(path)]) == 0 and "packed: a R, b W" in capsys.readouterr().out
    path.write_bytes(b"\xff\xfe\x00")
    assert main(["deps", str(path)]) == 2 and main(["deps", str(tmp_path)]) == 2
    assert capsys.readouterr().err.count("\n") == 2


def test_ten_thousand_lines_of_many_entries() -> None:
    """How long it takes is in experiments/bench/ptx_speed.py."""
    text = (truth.DATA / "kernels.ptx").read_text()
    body = text[text.index(".address_size 64") + 16 :]
    names = "|".join(set(re.findall(r"(?:\.entry|\.func(?:\s*\([^)]*\))?)\s+(\w+)\s*\(", body)) - {"vprintf"})
    copies = (re.sub(rf"\b({names})\b", rf"\1_{i}", body) for i in range(10000 // body.count("\n") + 1))
    big = HEAD + "".join(copies)
    assert big.count("\n") >= 10000
    assert len(modes(big)) > 100
