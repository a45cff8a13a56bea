"""Whether a program can run at all. Found here, once per cohort, instead of in the middle of a run.

The kernels of a cohort are ordered by their streams and by transfers (send before wait). If that order has no
cycle and every token waited for is sent, no run can get stuck; so deadlocks are found without running.
"""

from __future__ import annotations

from tesserasim.errors import InputError
from tesserasim.sim.order import MAX_DEVICES, MAX_POSITION
from tesserasim.sim.program import DEVICE_MODELS, SHARED, LaneProgram, Program, StreamProgram
from tesserasim.sim.result import DeadlockError
from tesserasim.sim.sharing import ONE


def check_program(program: Program) -> None:
    """Raise InputError, or DeadlockError for a wait that can never end; names lane, device and kernel."""
    if not program.lanes:
        raise InputError("the program has no lanes: nothing to simulate")
    if len(program.devices) > MAX_DEVICES:
        raise InputError(f"the program has {len(program.devices)} devices; the engine takes {MAX_DEVICES}")
    for channel in program.channels:
        if channel.bytes_per_s < 1 or channel.latency_ns < 0 or channel.setup_ns < 0:
            raise InputError(f"channel {channel.name}: bandwidth must be positive, latency and setup not negative")
        if channel.src == channel.dst:
            raise InputError(f"channel {channel.name} leads from a device to itself")
    if program.device_model not in DEVICE_MODELS:
        raise InputError(f"unknown device model {program.device_model!r}: one of {', '.join(DEVICE_MODELS)}")
    if program.domains and len(program.domains) != len(program.devices):
        raise InputError("the program must name the DRAM of every device, or of none")
    for lane in program.lanes:
        _check_lane(program, lane)


def _check_lane(program: Program, lane: LaneProgram) -> None:
    if lane.depth < 1 or lane.batch < 1:
        raise InputError(f"lane {lane.name}: batch and depth must be at least 1")
    if not any(s.duration for s in lane.streams):
        raise InputError(f"lane {lane.name} has no kernels: its cohorts would never take any time")
    devices = [s.device for s in lane.streams]
    if len(set(devices)) != len(devices):
        raise InputError(f"lane {lane.name}: two streams on one device; a cohort has one stream per device")
    for stream in lane.streams:
        _check_stream(program, lane, stream)
    _check_progress(program, lane)


def _check_stream(program: Program, lane: LaneProgram, s: StreamProgram) -> None:
    where = f"lane {lane.name}, device {program.devices[s.device]}"
    n = len(s.duration)
    if any(len(x) != n for x in (s.delay, s.shave, s.waits, s.sends, s.order)):
        raise InputError(f"{where}: the lists of a stream must have equal length")
    if s.labels is not None and len(s.labels) != n:
        raise InputError(f"{where}: {len(s.labels)} labels for {n} kernels")
    if not n:
        return
    if min(s.duration) < 1 or min(s.delay) < 0 or min(s.shave) < 0:
        raise InputError(f"{where}: a duration below 1 ns, or a negative delay or shave")
    if any(s.shave) and min(map(int.__sub__, s.duration, s.shave)) < 1:
        raise InputError(f"{where}: a shave leaves less than 1 ns of its kernel")
    if program.device_model == SHARED:
        if len(s.sm) != n or len(s.dram) != n:
            raise InputError(f"{where}: kernels of shared devices need demands of SMs and DRAM")
        if min(s.sm) < 1 or min(s.dram) < 0 or max(*s.sm, *s.dram) > ONE:
            raise InputError(f"{where}: demands must lie in [1, 2^20] for SMs and [0, 2^20] for DRAM")
    if min(s.order) < 0 or max(s.order) >= MAX_POSITION:
        raise InputError(f"{where}: positions must lie in [0, {MAX_POSITION})")


def _check_progress(program: Program, lane: LaneProgram) -> None:
    """Walk one cohort without times, from special kernel to special kernel, until nothing moves."""
    specials = {s.device: _specials(s) for s in lane.streams}
    reached = dict.fromkeys(specials, 0)  # per device: how many of its special kernels have run
    arrived: dict[int, int] = {}  # token -> device
    moved = True
    while moved:
        moved = False
        for s in lane.streams:
            todo = specials[s.device]
            while reached[s.device] < len(todo):
                i = todo[reached[s.device]]
                if not all(arrived.get(t) == s.device for t in s.waits[i] or ()):
                    break
                _note_sends(program, lane, s, i, arrived)
                reached[s.device] += 1
                moved = True
    for s in lane.streams:
        if reached[s.device] < len(specials[s.device]):
            i = specials[s.device][reached[s.device]]
            missing = [t for t in s.waits[i] or () if arrived.get(t) != s.device]
            name = f" ({s.labels[i]})" if s.labels else ""
            raise DeadlockError(
                f"lane {lane.name}, device {program.devices[s.device]}, kernel {i}{name} waits for token "
                f"{missing[0]}, which never arrives there: "
                "nothing sends it, or its sender waits for this kernel"
            )


def _specials(s: StreamProgram) -> list[int]:
    """Indices of the kernels that wait or send."""
    return [i for i, (w, x) in enumerate(zip(s.waits, s.sends, strict=True)) if w or x]


def _note_sends(program: Program, lane: LaneProgram, s: StreamProgram, i: int, arrived: dict[int, int]) -> None:
    """Check what kernel i sends, and note where its tokens go."""
    for send in s.sends[i] or ():
        where = f"lane {lane.name}, device {program.devices[s.device]}, kernel {i}"
        if not 0 <= send.channel < len(program.channels):
            raise InputError(f"{where} sends on channel {send.channel}, which does not exist")
        channel = program.channels[send.channel]
        if channel.src != s.device:
            raise InputError(f"{where} sends on channel {channel.name}, which starts at another device")
        if not 0 <= send.token < lane.tokens or send.token in arrived:
            raise InputError(f"{where} sends token {send.token}, which is out of range or was sent before")
        if send.nbytes < 0:
            raise InputError(f"{where} sends {send.nbytes} bytes")
        arrived[send.token] = channel.dst
