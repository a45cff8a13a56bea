"""What a result stands on: whether a plan was made for this case, and what the traces do not say."""

from __future__ import annotations

from collections.abc import Sequence

from tesserasim.cluster.model import Cluster, cluster_hash
from tesserasim.errors import InputError
from tesserasim.plans import Plan
from tesserasim.trace.mix import Mix

#: Begins every note about a plan that is older than its inputs; the command line repeats these as warnings.
CHANGED = "since the plan was made"
NO_ACCESSES = "the traces do not say which bytes kernels touch: nothing can be split, memory is not counted"


def check_made_for(plan: Plan, mix: Mix, cluster: Cluster) -> None:
    """InputError if a plan names another mix or cluster, or units and devices that these do not have."""
    for what, made_for, given in (("mix", plan.mix, mix.name), ("cluster", plan.cluster, cluster.name)):
        if made_for != given:
            raise InputError(f"the plan was made for {what} {made_for}, not {given}; make one with 'plan --out'")
    devices = {d.id for d in cluster.devices}
    for lane in plan.lanes:
        where = f"plan, lane {lane.name}"
        for unit in mix.units:
            if unit not in lane.assignment:
                raise InputError(f"{where}: no placement for unit {unit!r}")
        for unit, sites in lane.assignment.items():
            if unit not in mix.units:
                raise InputError(f"{where}: unknown unit {unit!r}; mix {mix.name} has {', '.join(mix.units)}")
            for site, device in sites.items():
                if device not in devices:
                    has = ", ".join(d.id for d in cluster.devices)
                    raise InputError(f"{where}: unit {unit}, site {site}: no device {device!r}; there are {has}")


def changed_since(plan: Plan, traces: Sequence[str], cluster: Cluster) -> list[str]:
    """Notes on inputs that differ from those the plan was made from; none where it does not say."""
    changed = []
    if plan.trace_hashes and tuple(plan.trace_hashes) != tuple(traces):
        changed.append(f"{CHANGED} the traces have changed: it may no longer be the best")
    if plan.cluster_hash and plan.cluster_hash != cluster_hash(cluster):
        changed.append(f"{CHANGED} prices, links or GPU figures have changed: it may no longer be the best")
    return changed


def without_accesses(mix: Mix) -> list[str]:
    """A note if no trace of the mix has a single access, as profiles have none."""
    traces = [trace for unit in mix.units for trace in mix.traces[unit]]
    return [] if any(k.accesses for trace in traces for k in trace.kernels) else [NO_ACCESSES]
