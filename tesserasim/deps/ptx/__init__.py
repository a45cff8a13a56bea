"""PTX analysis: which pointers a kernel reads and writes, from its text alone."""

from tesserasim.deps.ptx.affine import intervals
from tesserasim.deps.ptx.analysis import KernelEffects, analyse, analyse_file, modes

__all__ = ["KernelEffects", "analyse", "analyse_file", "intervals", "modes"]
