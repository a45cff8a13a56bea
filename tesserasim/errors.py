"""The errors a user can cause, each one line that says what, where and what to do."""

from __future__ import annotations


class TesserasimError(Exception):
    """Base of every error that the command line prints as one line (exit code 2)."""


class InputError(TesserasimError):
    """A file, an option or a name that cannot be used: says what, where and what to do."""


class NotKernelTraceError(InputError):
    """The file was recognised, but it is not a trace of GPU kernels: says what it is instead."""


class DoesNotFitError(InputError):
    """A placement exceeds a device's memory: names the device, what is placed there, and by how much."""
