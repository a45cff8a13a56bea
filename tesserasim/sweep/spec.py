"""The sweep spec: a TOML file that says which experiments to run.

A spec names mixes, clusters, links, policies and tables; `expand` multiplies them out. A policy whose result
does not depend on the link gets one experiment for all links. The optional `[quick]` table holds what
`--quick` changes.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tesserasim.errors import InputError
from tesserasim.policies.base import BATCHES, DEPTHS
from tesserasim.sweep.locate import find_mix
from tesserasim.sweep.toml import Table, read_toml

OWN_BEST, EQUAL = "own-best", "equal-in-flight"
TABLES = (EQUAL, OWN_BEST)
ENGINES = ("auto", "simpy", "fast")
MAX_EXPERIMENTS = 100_000
MAX_TOKENS = 10_000_000
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


@dataclass(frozen=True, slots=True)
class MixSpec:
    """One mix of a sweep and what is special about it."""

    path: str  # of the mix file
    batch: tuple[int, ...] = BATCHES
    in_flight: int = 64  # requests in flight in the equal table: sum of B * d over the lanes
    input_tokens: int | None = None
    output_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class SweepSpec:
    """Everything a sweep runs; the product of its lists."""

    name: str
    mixes: tuple[MixSpec, ...]
    clusters: tuple[str, ...]  # without a link
    links: tuple[str, ...]  # what follows the @, "" = what the cluster text says itself
    policies: tuple[str, ...] = ()  # () = every registered policy
    tables: tuple[str, ...] = TABLES
    depth: tuple[int, ...] = DEPTHS
    max_seqs: int = 256
    prices: str = "median"
    engine: str = "auto"
    seed: int = 0
    allow_extrapolation: bool = False  # beyond twice the captured range


@dataclass(frozen=True, slots=True)
class Experiment:
    """One policy on one mix, cluster, link and table. Plain values only: it travels to worker processes."""

    mix: str  # path of the mix file
    cluster: str
    link: str | None  # None: the policy's result is the same on every link
    policy: str
    table: str
    batch: tuple[int, ...]
    depth: tuple[int, ...]
    in_flight: int | None  # set in the equal table
    input_tokens: int | None
    output_tokens: int | None
    max_seqs: int
    prices: str
    engine: str
    seed: int
    allow_extrapolation: bool

    @property
    def group(self) -> tuple[str, str]:
        """Experiments of one group share most of their work (times, workloads), whatever the link."""
        return (self.mix, self.cluster)

    def cluster_text(self, default_link: str = "") -> str:
        link = self.link if self.link is not None else default_link
        return f"{self.cluster}@{link}" if link else self.cluster

    def label(self) -> str:
        where = self.cluster_text()
        return f"{Path(self.mix).stem} on {where}: {self.policy} ({self.table})"


def load_spec(path: Path, quick: bool = False) -> SweepSpec:
    """Read a spec; InputError names the file and the key that is missing, unknown or out of range."""
    data = read_toml(path, "sweep spec")
    changes = data.pop("quick", None)
    if changes is not None and not isinstance(changes, dict):
        raise InputError(f"{path}: quick must be a table")
    spec = _parse(data, path)
    if changes is not None:  # checked even when it is not used, so that a spec is right or wrong as a whole
        quick_spec = _quick(data, changes, path)
        if quick:
            return quick_spec
    elif quick:
        raise InputError(f"{path}: --quick needs a [quick] table that says what to change")
    return spec


def _quick(data: Mapping[str, Any], changes: Mapping[str, Any], path: Path) -> SweepSpec:
    """The spec with the changes of its [quick] table: any key but mixes, and output_tokens for all mixes."""
    table = Table(changes, f"{path}: quick")
    output = table.integer("output_tokens", None, 1, MAX_TOKENS)
    if table.take("mixes") is not None:
        raise table.fail("mixes", "cannot be changed; name another spec file instead")
    rest = {k: v for k, v in changes.items() if k not in ("output_tokens", "mixes")}
    merged = {**data, **rest}
    merged["name"] = rest.get("name", f"{data.get('name', path.stem)}-quick")
    spec = _parse(merged, path)
    if output is not None:
        # Models without tokens ignore this: their mixes carry no output length.
        mixes = tuple(
            m if m.output_tokens is None else dataclasses.replace(m, output_tokens=output) for m in spec.mixes
        )
        spec = dataclasses.replace(spec, mixes=mixes)
    return spec


def _parse(data: Mapping[str, Any], path: Path) -> SweepSpec:
    table = Table(data, str(path))
    name = table.text("name", _default_name(path))
    if not _NAME.fullmatch(name):
        raise table.fail("name", f"is {name!r}; use up to 64 letters, digits, '.', '_' and '-'")
    mixes = _mixes(table.take("mixes"), path)
    clusters = table.texts("clusters", None)
    links = table.texts("links", [""])
    if links != ("",):
        for cluster in clusters:
            if "@" in cluster or cluster.endswith(".toml"):
                raise table.fail("clusters", f"holds {cluster!r}, which has a link, beside 'links'; keep one")
    spec = SweepSpec(
        name, mixes, clusters, links,
        policies=table.texts("policies", []), tables=table.texts("tables", TABLES, TABLES),
        depth=table.integers("depth", DEPTHS, 1, 1024),
        max_seqs=table.integer("max_seqs", 256, 1, 1 << 20) or 256,
        prices=table.text("prices", "median"), engine=table.text("engine", "auto", ENGINES),
        seed=table.integer("seed", 0, 0, 2**63 - 1) or 0,
        allow_extrapolation=table.boolean("allow_extrapolation", False),
    )  # fmt: skip
    table.finish()
    return spec


def _default_name(path: Path) -> str:
    return re.sub(r"[^A-Za-z0-9._-]", "-", path.stem).lstrip(".-_")[:64] or "sweep"


def _mixes(value: Any, path: Path) -> tuple[MixSpec, ...]:
    if value is None:
        raise InputError(f"{path}: key 'mixes' is missing")
    if not isinstance(value, list) or not value or len(value) > 1000:
        raise InputError(f"{path}: mixes must be a list of mix names or [[mixes]] tables")
    mixes = tuple(_mix(entry, f"{path}: mixes[{i}]", path.parent) for i, entry in enumerate(value))
    if len({m.path for m in mixes}) != len(mixes):
        raise InputError(f"{path}: mixes names a mix twice")
    return mixes


def _mix(value: Any, where: str, directory: Path) -> MixSpec:
    table = Table({"mix": value} if isinstance(value, str) else value, where)
    text = table.text("mix")
    spec = MixSpec(
        str(find_mix(text, relative_to=directory).absolute()),
        batch=table.integers("batch", BATCHES, 1, 1 << 16),
        in_flight=table.integer("in_flight", 64, 1, 1 << 20) or 64,
        input_tokens=table.integer("input_tokens", None, 1, MAX_TOKENS),
        output_tokens=table.integer("output_tokens", None, 1, MAX_TOKENS),
    )
    table.finish()
    return spec


def expand(spec: SweepSpec, uses_link: Mapping[str, bool]) -> tuple[Experiment, ...]:
    """Every experiment of `spec`, group by group. `uses_link`: registered policy -> does the link matter."""
    policies = spec.policies or tuple(uses_link)
    count = len(spec.mixes) * len(spec.clusters) * len(spec.links) * len(policies) * len(spec.tables)
    if count > MAX_EXPERIMENTS:
        raise InputError(f"sweep {spec.name}: {count} experiments exceed {MAX_EXPERIMENTS}; split the spec")
    return tuple(_expand(spec, policies, uses_link))


def _expand(spec: SweepSpec, policies: Sequence[str], uses_link: Mapping[str, bool]) -> Iterable[Experiment]:
    for mix in spec.mixes:
        for cluster in spec.clusters:
            for link in (None, *spec.links):
                for policy in policies:
                    if uses_link[policy] == (link is None):
                        continue
                    for table in spec.tables:
                        yield _experiment(spec, mix, cluster, link, policy, table)


def _experiment(
    spec: SweepSpec, mix: MixSpec, cluster: str, link: str | None, policy: str, table: str
) -> Experiment:
    return Experiment(
        mix.path, cluster, link, policy, table, mix.batch, spec.depth,
        in_flight=mix.in_flight if table == EQUAL else None,
        input_tokens=mix.input_tokens, output_tokens=mix.output_tokens, max_seqs=spec.max_seqs,
        prices=spec.prices, engine=spec.engine, seed=spec.seed, allow_extrapolation=spec.allow_extrapolation,
    )  # fmt: skip
