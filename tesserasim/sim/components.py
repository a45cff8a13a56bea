"""Which lanes can influence each other at all."""

from __future__ import annotations

from tesserasim.sim.program import Program


def components(program: Program) -> list[list[int]]:
    """Lanes grouped so that lanes of different groups share no device and no channel; in lane order."""
    groups: list[tuple[set[int], list[int]]] = []
    for index, lane in enumerate(program.lanes):
        devices = {s.device for s in lane.streams if s.duration}
        for s in lane.streams:
            for sends in s.sends:
                if sends:
                    devices.update(program.channels[x.channel].dst for x in sends)
        members = [index]
        apart = []
        for used, lanes in groups:
            if used & devices:
                devices |= used
                members = lanes + members
            else:
                apart.append((used, lanes))
        groups = [*apart, (devices, sorted(members))]
    return sorted(lanes for _, lanes in groups)
