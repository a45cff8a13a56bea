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
    """Lanes grouped so that lanes of different groups share no device, channel or copy engine, nor a DRAM of shared
    devices; in lane order."""
    used: list[set[Hashable]] = []
    for lane in program.lanes:
        devices = {s.device for s in lane.streams if s.duration}
        engines: set[Hashable] = set()
        for s in lane.streams:
            for sends in s.sends:
                if sends:
                    channels = [program.channels[x.channel] for x in sends]
                    devices.update(c.dst for c in channels)
                    engines.update(("engine", c.engine) for c in channels if c.engine is not None)
        shared = program.device_model == SHARED
        used.append({*engines, *(program.domain(d) if shared else d for d in devices)})
    return grouped(used)
