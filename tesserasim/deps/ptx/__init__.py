"""PTX analysis: which pointers a kernel reads and writes, and which bytes of them, from its text alone.

What other modules may use:

- `analyse(text, name="<ptx>") -> dict[str, KernelEffects]` and `analyse_file(path)`: every entry of a text, in its
  order. `KernelEffects.modes` maps each pointer that a parameter can hold (`name`, or `name+offset` for one inside a
  parameter that is a struct) to `none`, `R`, `W`, `RW` or `unknown`; it also has `"*": "unknown"` if memory may be
  touched that no parameter names. Modes are upper bounds: what is not in them cannot happen.
- `modes(text, name="<ptx>") -> {entry: {parameter: mode}}`: the same without the rest; `deps FILE.ptx --json`.
- `intervals(entry, grid, block, params, cluster=None) -> {parameter: (lo, hi) | None}`: bytes [lo, hi) of every
  pointer that one launch of a `KernelEffects` may touch, counted from the pointer; a superset, or None for "not
  known". `params` are the values of the integers among the parameters, signed or unsigned as declared; those that
  are left out are not known. An empty interval (0, 0) says that this launch does not touch the pointer.

Malformed text and empty launches raise InputError (`file:line: what`). Limits: a number that is multiplied by
another number stays a candidate for a pointer unless its base is one for sure (`.ptr`, or `cvta.to.global` at once);
recursion, functions without a body and calls through pointers are `unknown`; texture handles are `unknown`; bytes
behind a tensor map, or at an index that memory holds, are not known.
"""

from tesserasim.deps.ptx.affine import intervals
from tesserasim.deps.ptx.analysis import KernelEffects, analyse, analyse_file, modes

__all__ = ["KernelEffects", "analyse", "analyse_file", "intervals", "modes"]
