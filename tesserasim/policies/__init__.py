"""Scheduling policies, one a file. `policies()` lists them; base.py says how to add one."""

from __future__ import annotations

from tesserasim.errors import InputError
from tesserasim.policies.base import Context, Limits, NotApplicable, Policy, Run, Scored, register, registry

__all__ = [
    "Context", "Limits", "NotApplicable", "Policy", "Run", "Scored", "find_policy", "policies", "register",
]  # fmt: skip


def policies() -> dict[str, type[Policy]]:
    """Name -> class of every policy, in the order in which tables show them."""
    # Importing a module registers its policies; the order here is the order of tables.
    from tesserasim.policies import single, replicas, pd, af, kernel  # noqa: F401, I001

    return registry()


def find_policy(name: str) -> Policy:
    """The policy of that name; InputError lists the known ones."""
    known = policies()
    if name not in known:
        raise InputError(f"unknown policy {name!r}; known: {', '.join(known)}")
    return known[name]()
