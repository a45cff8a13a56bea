"""The order of events at one moment, by meaning and not by who was created first.

Within one nanosecond everything that *ends* is settled before anything *starts*. So a kernel that becomes
ready at t competes for a device that becomes free at t, whatever the order in which the two came about.
Events of one class are ordered by cohort (older first), then by the kernel's position in the mix, then by
device. Two events never share a key, so a run does not depend on creation order, hash seed or machine.
"""

from __future__ import annotations

#: A link is free before kernels end: what they send finds the link as it is at that moment.
TRANSFER_END = 0
#: A kernel's end hands its output to links; the stream's next kernel may start at this moment.
KERNEL_END = 1
#: An arrival with latency 0 still belongs to the moment in which its transfer ended.
ARRIVAL = 2
#: New cohorts enter when all that ended has been counted, in order of (lane, slot).
ENTRY = 3
#: Decisions come last: at t a device chooses among all heads that are ready at t.
START = 4

_DEVICE_BITS = 8
_POSITION_BITS = 24
_COHORT_BITS = 24
MAX_DEVICES = 1 << _DEVICE_BITS
MAX_POSITION = 1 << _POSITION_BITS
MAX_COHORTS = 1 << _COHORT_BITS
_COHORT_SHIFT = _DEVICE_BITS + _POSITION_BITS
_CLASS_SHIFT = _COHORT_SHIFT + _COHORT_BITS
#: SimPy keeps priorities 0 (urgent) and 1 (normal) for its own events; ours must stay above both.
_ABOVE_SIMPY = 2


def key(event_class: int, cohort: int, position: int, device: int) -> int:
    """The tie key, packed into one integer (59 bits) that can stand where SimPy has its priority."""
    return (
        (event_class << _CLASS_SHIFT) + (cohort << _COHORT_SHIFT) + (position << _DEVICE_BITS) + device + _ABOVE_SIMPY
    )


def cohort_part(cohort: int) -> int:
    """What a cohort adds to a key made with cohort 0 (keys of a stream are packed once)."""
    return cohort << _COHORT_SHIFT
