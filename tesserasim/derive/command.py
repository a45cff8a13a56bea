"""The command `derive`. Nothing heavy is imported at the top: the command line reads this module for its help."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

Show = Callable[[Any, bool, str], None]


def _whole(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = 0
    if not 1 <= value <= 2**31:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a whole number of at least 1")
    return value


def _several(text: str) -> tuple[int, ...]:
    """`1,8,32`."""
    return tuple(_whole(part) for part in text[:2000].split(","))


def add_derive(commands: Any, command: Callable[..., argparse.ArgumentParser], show: Show) -> None:
    """The command `derive`; `show` prints a result as JSON or as text."""
    c = command(commands, "derive", lambda o: _derive(o, show), "traces and a mix from a published config.json")
    c.add_argument("config", type=Path, metavar="CONFIG.json", help="a Hugging Face model configuration")
    c.add_argument("--tp", type=_whole, default=1, metavar="N", help="GPUs of a tensor-parallel group (default: 1)")
    c.add_argument("--weights", choices=("bf16", "fp8", "mxfp4"), help="default: as the published weights are stored")
    c.add_argument("--out", type=Path, metavar="DIR", help="where the files are written (default: derived/NAME)")
    c.add_argument("--name", default="", help="name of the mix (default: model, weights and group)")
    c.add_argument("--gpu", default="H200-SXM", metavar="NAME", help="reference GPU of the times (default: H200-SXM)")
    c.add_argument("--link", metavar="KIND", help="link inside the group (default: the GPU's NVLink or PCIe)")
    c.add_argument("--input-tokens", type=_whole, default=1024, metavar="S")
    c.add_argument("--output-tokens", type=_whole, default=256, metavar="O")
    c.add_argument("--prefill-batch", type=_whole, default=1, metavar="N", help="prompts per prefill (default: 1)")
    c.add_argument("--prefill", type=_several, metavar="T,T", help="prompt lengths (default: 256 to 8192)")
    c.add_argument("--batches", type=_several, metavar="B,B", help="batches of decode steps (default: 1 to 256)")
    c.add_argument("--contexts", type=_several, metavar="C,C", help="contexts of decode steps (default: 512 to 8192)")


def _derive(options: argparse.Namespace, show: Show) -> int:
    from tesserasim.derive.run import BATCHES, CONTEXTS, PREFILL, Options, derive, document, write
    from tesserasim.errors import InputError
    from tesserasim.writing import check_directory

    name = options.name
    if name and (not name.isprintable() or "/" in name or name.startswith(".") or len(name) > 100):
        raise InputError(f"--name {name[:40]!r}: give a short plain name, without '/'")
    wanted = Options(
        options.tp, options.weights, options.gpu, options.link, name, options.input_tokens, options.output_tokens,
        options.prefill_batch, options.prefill or PREFILL, options.batches or BATCHES, options.contexts or CONTEXTS,
    )  # fmt: skip
    if options.out is not None:
        check_directory(options.out)
    made = derive(options.config, wanted)
    out = options.out or Path("derived") / made.name
    check_directory(out)
    mix, files = write(made, out)
    found = document(made, mix, files)
    show(found, options.json, _words(found))
    return 0


def _words(d: dict[str, Any]) -> str:
    group = f", one rank of {d['tp']}" if d["tp"] > 1 else ""
    lines = [
        f"{d['mix']}: {d['model']} ({d['model_type']}), {d['weights']}{group}: DERIVED, nothing was measured",
        f"  {d['parameters'] / 1e9:.2f} billion parameters, {d['active_parameters'] / 1e9:.2f} used by a token, "
        f"{d['weight_bytes_per_rank'] / 1e9:.1f} GB of weights per GPU, {d['kv_bytes_per_token_per_rank']} bytes of "
        "cache per token and GPU",
        f"  times: modelled for {d['gpu']}, with gaps of {d['gap_ns']} ns between kernels",
    ]
    c = d["collectives"]
    if c:
        lines.append(f"  all-reduce: {c['formula']}; {c['kind']}, {c['gbps']:g} Gb/s, {c['latency_us']:g} us")
    for u in d["units"]:
        where = f"{u['tokens']} tokens" if u["unit"] == "prefill" else f"context {u['context']}"
        lines.append(f"  {u['unit']:<8} batch {u['batch']:>3}, {where:<14} {u['kernels']:>5} kernels "
                     f"{u['modelled_us'] / 1e3:10.3f} ms modelled")  # fmt: skip
    return "\n".join([*lines, *(f"  note: {n}" for n in d["notes"])])
