"""From journals of pairs to constants: those that made the times are found again."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tesserasim.errors import InputError
from tesserasim.sim.calibrate import calibrate, together_ns
from tesserasim.sim.sharing import ONE, Sharing
from tesserasim.trace.model import Kernel, Trace, TraceMeta
from tesserasim.trace.parquet import write_trace

pytestmark = pytest.mark.quick
ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "experiments/validation/calibrate_sharing.py"
TRUE = Sharing(round(0.9 * ONE), ONE, round(0.95 * ONE), round(0.8 * ONE))


def script() -> Any:
    spec = importlib.util.spec_from_file_location("calibrate_sharing", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def trace(sms: int) -> Trace:
    """Kernels of 10 us with all, half and a sixth of the SMs, and about all, half and nothing of the DRAM."""
    meta = TraceMeta(
        origin="synthetic", model="toy", unit={"name": "u"}, gpu=f"H200-SXM/{sms}sm", extra={"copy_gbs": 4000.0}
    )
    shapes = ((64, 44_000_000), (32, 22_000_000), (11, 1000), (64, 30_000_000))
    kernels = tuple(
        Kernel(i, f"k{i}", f"m/k{i}#0", grid=(blocks, 1, 1), block=(1024, 1, 1), shared_bytes=120_000,
               read_bytes=nbytes, duration_ns=10_000)
        for i, (blocks, nbytes) in enumerate(shapes)
    )  # fmt: skip
    return Trace(meta, buffers=(), kernels=kernels)


def folder(out: Path) -> Path:
    tools = script()
    traces = [trace(64), trace(68)]
    for device, t in zip("ab", traces, strict=True):
        path = out / "profile" / device / "toy" / "u.parquet"
        path.parent.mkdir(parents=True)
        write_trace(t, path)
    rows: list[dict[str, Any]] = [{"kind": "session", "model": "toy"}]
    for where in ("same", "across"):
        for a in range(4):
            for b in range(4):
                one = tools.solo(traces[0], [a], 10_000.0)
                other = tools.solo(traces[int(where == "across")], [b], 10_000.0)
                both = together_ns(one, other, TRUE, where == "across")
                # the quicker of equals takes as long as the other: both run to the end together
                rows.append({"kind": "pair", "where": where, "kernels": [[a], [b]], "alone_ns": [10_000.0] * 2,
                             "together_ns": [both, both]})  # fmt: skip
    path = out / "pairs/toy/u.jsonl"
    path.parent.mkdir(parents=True)
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    return path


def test_constants_come_back_from_the_journal(tmp_path: Path) -> None:
    folder(tmp_path)
    found = calibrate(script().read_pairs(tmp_path)["toy"])
    assert found.rms < 0.02
    for name in ("sm_efficiency", "corun_rate", "dram_byte_share"):
        assert getattr(found.constants, name) / getattr(TRUE, name) == pytest.approx(1, abs=0.03), name


def test_demands_of_a_site_are_weighted_by_time(tmp_path: Path) -> None:
    found = script().solo(trace(64), [0, 2], 20_000.0)
    assert found.sm == round((ONE + round(ONE * 11 / 64)) / 2)
    assert found.dram == round(ONE * 44_001_000 / 20_000 / 4000)


@pytest.mark.parametrize("bad", ['{"kind": "pair"}', '{"kind": "pair", "where": "same", "kernels": [[0], [99]], '
                                 '"alone_ns": [1, 1], "together_ns": [1, 1]}', "[1]"])  # fmt: skip
def test_a_broken_journal_is_one_line(bad: str, tmp_path: Path) -> None:
    path = folder(tmp_path)
    path.write_text(path.read_text() + bad + "\n{}\n")
    with pytest.raises(InputError, match="line 34"):
        script().read_pairs(tmp_path)


def test_without_pairs_it_says_so(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, SCRIPT, tmp_path], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "no pairs" in done.stderr and done.stderr.count("\n") == 1
