"""Import of a profile, whatever its format: Kineto JSON(.gz), Nsight Systems SQLite or `nsys stats` CSV → `Trace`."""

from __future__ import annotations

import dataclasses
import os

from tesserasim.errors import InputError, NotKernelTraceError
from tesserasim.trace import kineto, nsys, nsys_csv
from tesserasim.trace.assemble import no_kernels, trace_of_profile
from tesserasim.trace.iterations import find_iterations
from tesserasim.trace.model import Trace
from tesserasim.trace.rows import Profile
from tesserasim.trace.sniff import FileKind, name_json, require_profile, sniff


def import_profile(path: str | os.PathLike[str], clip: bool = False) -> Trace:
    """Import the profile at `path`; what it is, its content decides.

    `clip` ends every row where the next one on its stream begins: the remedy for profiles whose durations
    run over their successors (the warnings of the trace say when to think of it). `meta.extra["iterations"]`
    says which repeats were found (`iterations.py`).

    Raises InputError for a file that cannot be read, NotKernelTraceError for one that is something else or
    holds no GPU kernels, copies or sets.
    """
    profile = load_profile(path)
    if not profile.rows:
        raise NotKernelTraceError(no_kernels(os.fspath(path), profile))
    trace, rows = trace_of_profile(profile, os.fspath(path), clip)
    found = find_iterations(profile, rows)
    if found is None:
        return trace
    extra = {**trace.meta.extra, "iterations": found.as_json()}
    return dataclasses.replace(trace, meta=dataclasses.replace(trace.meta, extra=extra))


def load_profile(path: str | os.PathLike[str]) -> Profile:
    """The rows of a file that was found to be a profile. Errors as in `import_profile`, except emptiness."""
    where = os.fspath(path)
    kind = sniff(path)
    require_profile(path, kind)
    if kind is FileKind.PARQUET:
        raise InputError(f"{where}: already a Parquet trace; there is nothing to import")
    if kind is FileKind.NSYS_SQLITE:
        return nsys.read_profile(path)
    if kind is FileKind.NSYS_STATS_CSV:
        return nsys_csv.read_profile(path)
    profile = kineto.read_profile(path)
    if "traceEvents" not in profile.keys and not profile.bare_array:
        named = name_json(profile.keys)
        if named is not FileKind.JSON:
            require_profile(path, named)
    return profile
