"""Writing a mix: from trace files to the TOML that names them."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tesserasim.errors import InputError
from tesserasim.trace.mix import load_mix
from tesserasim.trace.parquet import read_trace
from tesserasim.writing import check_output, naming, write_whole


@dataclass(frozen=True)
class MixOptions:
    """What the traces do not say about a request."""

    name: str = ""  # default: the file's stem
    input_tokens: int | None = None
    output_tokens: int | None = None
    prefill_batch: int = 1
    launches: Mapping[str, int] = field(default_factory=dict)  # unit -> launches per request, images


def new_mix(traces: Sequence[Path], out: Path, options: MixOptions) -> dict[str, object]:
    """Write the mix of `traces` to `out` and return what it says.

    Units named prefill or decode make a language model, which needs token lengths; any other unit is a stage
    before its prefill. Without them all are a chain of stages in the order of the traces. The file is read back
    before it appears.
    """
    if out.suffix != ".toml":
        raise InputError(f"{out}: a mix file ends in .toml")
    check_output(out, *traces)
    units: dict[str, int] = {}
    models: dict[str, None] = {}
    for path in traces:
        trace = read_trace(path)
        units.setdefault(trace.unit, options.launches.get(trace.unit, 1))
        models.setdefault(trace.meta.model)
    if len(models) > 1:
        raise InputError(f"mix {out}: traces of several models: {', '.join(models)}")
    for unit in options.launches:
        if unit not in units:
            raise InputError(f"mix {out}: no trace of unit {unit!r}; units: {', '.join(units)}")
    language = bool({"prefill", "decode"} & set(units))
    if language and not (options.input_tokens and options.output_tokens):
        raise InputError(f"mix {out}: a language model needs --input-tokens and --output-tokens")
    for unit in {"prefill", "decode"} & set(options.launches):
        raise InputError(f"mix {out}: --launches is for stages; the launches of {unit} follow from the token lengths")
    content: dict[str, object] = {
        "name": options.name or out.stem, "model": next(iter(models)), "kind": "llm" if language else "stages",
    }  # fmt: skip
    if language:
        content |= {"input_tokens": options.input_tokens, "output_tokens": options.output_tokens}
        content |= {"prefill_batch": options.prefill_batch}
    stages = [[unit, count] for unit, count in units.items() if not language or unit not in ("prefill", "decode")]
    if stages:
        content["stages"] = stages
    content["traces"] = [Path(os.path.relpath(p, out.parent)).as_posix() for p in traces]
    _write_checked(content, out)
    return content


def _write_checked(content: Mapping[str, object], out: Path) -> None:
    # JSON text of strings, numbers and lists is TOML too (non-ASCII kept as it is: TOML has no surrogates).
    lines = [f"{key} = {json.dumps(value, ensure_ascii=False)}\n" for key, value in content.items()]
    trial = out.with_name(f".{out.stem[:40]}.{os.getpid()}.tmp.toml")
    try:
        write_whole(trial, "".join(lines).encode())
        load_mix(trial)
        with naming(out):
            os.replace(trial, os.path.realpath(out))
    except InputError as error:
        raise InputError(str(error).replace(str(trial), str(out))) from None
    finally:
        trial.unlink(missing_ok=True)
