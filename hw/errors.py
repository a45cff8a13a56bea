"""Errors of the hardware side: one line, exit code 2."""

from __future__ import annotations

from tesserasim.errors import TesserasimError


class HardwareError(TesserasimError):
    """Something about this machine, its driver or a capture that makes the command impossible."""


class DriverError(HardwareError):
    """A call of the driver failed: while a kernel runs, that may be the kernel's doing."""
