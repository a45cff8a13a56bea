"""Which lanes can influence each other at all."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Set

from tesserasim.sim.program import SHARED, Program


def grouped(used: Iterable[Set[Hashable]]) -> list[list[int]]:
    """Indices of the sets, grouped so that sets of different groups have nothing in common; in order."""
    groups: list[tuple[set[Hashable], list[int]]] = []
    for index, things in enumerate(used):
        together, members, apart = set(things), [index], []
        for others, group in groups:
            if others & together:
                together |= others
                members = group + members
            else:
                apart.append((others, group))
        groups = [*apart, (together, sorted(members))]
    return sorted(members for _, members in groups)


def components(program: Program) -> list[list[int]]:
    """Lanes grouped so that lanes of different groups share no device and no channel, nor a DRAM of shared devices;
    in lane order."""
    used = []
    for lane in program.lanes:
        devices = {s.device for s in lane.streams if s.duration}
        for s in lane.streams:
            for sends in s.sends:
                if sends:
                    devices.update(program.channels[x.channel].dst for x in sends)
        used.append({program.domain(d) for d in devices} if program.device_model == SHARED else devices)
    return grouped(used)
