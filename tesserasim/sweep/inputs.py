"""Everything an experiment's result depends on, as plain data, and the key that is its hash.

Left out on purpose: where files lie, how many jobs run, and when. Put in on purpose: a fingerprint of the
simulator's own source, so that a policy changed by one line is not answered from an old result.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tesserasim import __version__
from tesserasim.errors import InputError
from tesserasim.sweep.spec import Experiment
from tesserasim.sweep.store import finite
from tesserasim.sweep.toml import read_toml

#: Parts of the package that cannot change a result, only how it is asked for or shown.
_SHOW_ONLY = ("report", "schemas")
_SHOW_ONLY_FILES = ("cli.py", "api.py", "arguments.py", "terminal.py", "__main__.py")


def code_version() -> str:
    """Version of the package + a hash over the source and data files that results depend on, as they are now."""
    root = Path(__file__).resolve().parents[1]
    total = hashlib.sha256()
    for path in sorted(root.rglob("*")):
        inside = path.relative_to(root)
        if path.suffix not in (".py", ".csv", ".json", ".toml") or inside.parts[0] in _SHOW_ONLY:
            continue
        if str(inside) in _SHOW_ONLY_FILES:
            continue
        total.update(f"{inside.as_posix()}\0".encode() + path.read_bytes() + b"\0")
    return f"{__version__}+{total.hexdigest()[:12]}"


def mix_content(path: Path) -> dict[str, Any]:
    """What a mix file says, and the hash of every trace file it names."""
    data = read_toml(path, "mix")
    patterns = data.get("traces")
    if not isinstance(patterns, list) or not all(isinstance(p, str) for p in patterns):
        raise InputError(f"{path}: 'traces' must be a list of file names")
    hashes = {}
    for pattern in patterns:
        files = sorted(path.parent.glob(pattern)) if any(c in pattern for c in "*?[") else [path.parent / pattern]
        for file in files:
            try:
                name = Path(os.path.relpath(file, path.parent)).as_posix()
                hashes[name] = hashlib.sha256(file.read_bytes()).hexdigest()
            except OSError as error:
                raise InputError(f"{path}: trace {file}: {error.strerror}") from None
    return {"mix": finite(data), "traces": hashes}


def inputs(
    experiment: Experiment, mix: Mapping[str, Any], cluster: Any, version: str | None = None
) -> dict[str, Any]:
    """Plain data that decides the result of `experiment`. `cluster`: the parsed Cluster."""
    machines = dataclasses.asdict(cluster)
    machines["name"] = experiment.cluster
    if experiment.link is None:
        del machines["links"], machines["nic_gbps"]
    asked = dataclasses.asdict(experiment)
    del asked["mix"]
    return {**asked, "mix": dict(mix), "machines": finite(machines), "tool": version or code_version()}
