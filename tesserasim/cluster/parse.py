"""From text to a cluster: the short form on a command line, and TOML files for everything else.

Short form
    ``[N x] GPU [+ [N x] GPU ...] [@ LINK]``, for example ``A100-80GB-PCIe+L40S@25Gbps`` or
    ``2xH100-SXM+RTX-PRO-6000@pcie5``. LINK is a bandwidth per direction (``25Gbps``: an RDMA port of that
    rate on every GPU) or a link kind of the catalogue (``nvlink4``, ``pcie4``, ``rdma100``). All pairs are
    linked alike, through one port per GPU that its links share. Without ``@`` the link is `DEFAULT_LINK`.

TOML
    ::

        name = "lab"                                # optional
        devices = ["A100-80GB-PCIe", "2xL40S"]      # ids: A100-80GB-PCIe, L40S#0, L40S#1
        link = "25Gbps"                             # every pair without an entry in links
        links = [{ a = "L40S#0", b = "L40S#1", kind = "pcie4" },
                 { a = "A100-80GB-PCIe", b = "L40S#0", gbps = 90.0, latency_us = 20.0 }]
        nic_gbps = { "L40S#0" = 25.0 }              # ports; without an entry a port limits nothing
        prices = { L40S = 0.85 }                    # goes before the prices asked for
        dram_domains = [["L40S#0", "L40S#1"]]       # partitions of one GPU share its DRAM (shared devices)
        sms = { "L40S#0" = 64 }                     # multiprocessors of a partition (shared devices)
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import combinations, groupby
from pathlib import Path
from typing import Any

from tesserasim.cluster.catalogue import find_gpu, link_kinds, price_of
from tesserasim.cluster.catalogue import prices as price_table
from tesserasim.cluster.model import Cluster, Device, GpuSpec, Link, LinkKind, Price
from tesserasim.errors import InputError
from tesserasim.files import path_text, read_toml, shown

#: A port that a rented machine of any of these GPUs can have.
DEFAULT_LINK = "200Gbps"
MAX_DEVICES = 64  # every pair gets a link, and planners are made for a handful of devices
MIN_GBPS, MAX_GBPS = 0.01, 100_000.0
MAX_LATENCY_US = 1_000_000.0
_TOML_KEYS = frozenset({"name", "devices", "link", "links", "nic_gbps", "prices", "dram_domains", "sms"})
_LINK_KEYS = frozenset({"a", "b", "kind", "gbps", "latency_us", "setup_us", "in_order"})
_NUMBER = r"[+-]?(?:[0-9][0-9.]*(?:e[+-]?[0-9]+)?|\.[0-9]+|nan|inf(?:inity)?)"


def parse_cluster(text: str, prices: str = "median") -> Cluster:
    """The cluster that `text` describes: the short form, or the path of a TOML file (module docstring).

    `prices` as in `catalogue.prices`. Raises InputError for whatever cannot be meant: unknown GPUs, counts
    below 1 or above `MAX_DEVICES` in all, bandwidths that are not numbers, ids that do not exist.
    """
    table = price_table(prices)
    where = f"cluster {shown(text, 80)}"
    if text.strip().lower().endswith(".toml"):
        return _from_toml(Path(text.strip()), table)
    body, at, link_text = text.partition("@")
    if at and not link_text.strip():
        raise InputError(f"{where}: nothing after '@'; write a bandwidth (25Gbps) or a kind")
    devices = _devices(body.split("+"), where)
    kind = _link_kind(link_text if at else DEFAULT_LINK, where)
    links = tuple(_link(a.id, b.id, kind) for a, b in combinations(devices, 2))
    ports = {d.id: kind.gbps for d in devices} if links else {}
    return Cluster(_short_name(devices, kind), devices, links, _used(table, devices), ports)


def _devices(groups: Sequence[str], where: str) -> tuple[Device, ...]:
    specs: list[GpuSpec] = []
    for group in groups:
        count, spec = _group(group, where)
        if len(specs) + count > MAX_DEVICES:
            raise InputError(f"{where}: more than {MAX_DEVICES} GPUs")
        specs += [spec] * count
    total, seen = Counter(s.name for s in specs), Counter[str]()
    devices = []
    for s in specs:
        devices.append(Device(s.name if total[s.name] == 1 else f"{s.name}#{seen[s.name]}", s))
        seen[s.name] += 1
    return tuple(devices)


def _group(text: str, where: str) -> tuple[int, GpuSpec]:
    """`N x GPU` or `GPU` -> how many, which."""
    text = _plain(text, where).strip()
    if not text:
        raise InputError(f"{where}: an empty GPU name; write for example A100-80GB-PCIe+L40S@25Gbps")
    name, colon, option = text.partition(":")
    match = re.match(rf"({_NUMBER})\s*[xX*]\s*(.*)$", name, re.IGNORECASE)
    count_text, name = match.groups() if match else ("1", name)
    if not re.fullmatch(r"\+?[0-9]{1,6}", count_text) or not 1 <= int(count_text) <= MAX_DEVICES:
        raise InputError(f"{where}: {shown(count_text, 20)} is not a number of GPUs (1 to {MAX_DEVICES})")
    spec = find_gpu(name)
    if colon:
        if re.fullmatch(r"tp[0-9]{1,6}", option.strip().lower()):
            raise InputError(
                f"{where}: tensor-parallel groups are not simulated yet; leave out ':{option.strip()}'"
            )
        raise InputError(f"{where}: {shown(option)} after {shown(name)} is not understood")
    return int(count_text), spec


def _plain(text: str, where: str) -> str:
    """The text itself; InputError for a character that no GPU or link name has (NUL, digits of other scripts)."""
    for c in text:
        if c not in "\t\n" and not " " <= c <= "~":
            raise InputError(f"{where}: holds the character U+{ord(c):04X}; write plain letters and digits")
    return text


def _number(value: Any) -> float:
    """A TOML number as a float; NaN for everything else, so that no range admits it."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return math.nan
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _text_number(text: str) -> float:
    """A number that `_NUMBER` matched; NaN if it is none after all ("1.2.3")."""
    try:
        return float(text)
    except ValueError:
        return math.nan


def _bandwidth(value: Any, where: str) -> float:
    """Gb/s per direction; InputError unless it is a finite number within the limits."""
    gbps = _number(value)
    if not MIN_GBPS <= gbps <= MAX_GBPS:
        raise InputError(f"{where}: {shown(value)} is not a bandwidth in Gb/s ({MIN_GBPS:g} to {MAX_GBPS:g})")
    return gbps


def _link_kind(text: str, where: str) -> LinkKind:
    """A link kind by name, or an RDMA port of the stated rate with the hop cost of the nearest port known."""
    kinds = link_kinds()
    name = re.sub(r"[\s_-]", "", _plain(text, where)).lower()
    if name in kinds:
        return kinds[name]
    word = text.strip()
    match = re.fullmatch(rf"({_NUMBER})\s*(?:gbps|gbit/s|gb/s)", word, re.IGNORECASE)
    if not match:
        raise InputError(
            f"{where}: {shown(text)} is not a link: write a bandwidth (25Gbps) or one of {', '.join(kinds)}"
        )
    if re.search(r"B(ps|/s)$", word):
        raise InputError(f"{where}: {shown(text)} reads as gigabytes: links are given in gigabit (25Gbps)")
    gbps = _bandwidth(_text_number(match.group(1)), where)
    ports = [k for k in kinds.values() if k.name.startswith("rdma")]
    near = min(ports, key=lambda k: abs(math.log(k.gbps / gbps)))
    if near.gbps == gbps:
        return near
    source = f"as {near.name}: {near.latency_source}"
    return LinkKind("rdma", gbps, gbps, near.latency_us, "as asked for", source)


def _link(a: str, b: str, kind: LinkKind) -> Link:
    source = f"bandwidth: {kind.gbps_source}; latency: {kind.latency_source}"
    return Link(a, b, kind.gbps, kind.latency_us, kind.name, source)


def _short_name(devices: Sequence[Device], kind: LinkKind) -> str:
    """The canonical short form; parsing it gives the same cluster."""
    runs = [(name, len(list(run))) for name, run in groupby(d.gpu.name for d in devices)]
    body = "+".join(name if n == 1 else f"{n}x{name}" for name, n in runs)
    if len(devices) == 1:
        return body
    if kind.name.startswith("rdma"):
        return f"{body}@{repr(kind.gbps).removesuffix('.0')}Gbps"
    return f"{body}@{kind.name}"


def _used(table: Mapping[str, Price], devices: Sequence[Device]) -> dict[str, Price]:
    return {n: table[n] for n in dict.fromkeys(d.gpu.name for d in devices) if n in table}


# --- TOML ----------------------------------------------------------------------------------------------


def _from_toml(path: Path, table: Mapping[str, Price]) -> Cluster:
    where = f"cluster {path_text(path)}"
    spec = read_toml(path, "cluster")
    _only(spec, _TOML_KEYS, where)
    groups = spec.get("devices")
    if not isinstance(groups, list) or not groups or not all(isinstance(g, str) for g in groups):
        raise InputError(f'{where}: needs devices = ["GPU", "2xGPU", ...]')
    devices = _devices(groups, where)
    ids = {d.id for d in devices}
    default = _link_kind(_text(spec.get("link", DEFAULT_LINK), f"{where}: link"), where)
    listed = _listed_links(spec.get("links", []), ids, where)
    links = tuple(
        listed.get(frozenset((a.id, b.id))) or _link(a.id, b.id, default) for a, b in combinations(devices, 2)
    )
    ports = {}
    for device, gbps in _table(spec.get("nic_gbps", {}), f"{where}: nic_gbps").items():
        ports[_known(device, ids, where)] = _bandwidth(gbps, f"{where}: nic_gbps of {shown(device)}")
    devices = _partitions(devices, _table(spec.get("sms", {}), f"{where}: sms"), where)
    domains = _domains(spec.get("dram_domains", []), devices, where)
    own = {}
    for gpu, usd in _table(spec.get("prices", {}), f"{where}: prices").items():
        price = f"{where}: price of {shown(gpu)}"
        if isinstance(usd, str):
            raise InputError(f"{price}: {shown(usd)} is not a number of US dollars per hour")
        own[find_gpu(_plain(gpu, where)).name] = price_of(usd, price, path.name)
    name = _text(spec.get("name", path.stem), f"{where}: name")
    if not name or len(name) > 200 or not name.isprintable():
        raise InputError(f"{where}: name must be a line of text of at most 200 characters, not {shown(name)}")
    return Cluster(name, devices, links, _used({**table, **own}, devices), ports, domains)


def _partitions(devices: tuple[Device, ...], sms: Mapping[str, Any], where: str) -> tuple[Device, ...]:
    """The devices, those in `sms` with that many multiprocessors."""
    known = {d.id: d for d in devices}
    for name, count in sms.items():
        device = known[_known(name, set(known), f"{where}: sms")]
        whole = isinstance(count, int) and not isinstance(count, bool)
        if not whole or not 1 <= count <= device.gpu.sms:
            raise InputError(f"{where}: sms of {shown(name)}: {shown(count)} is not in 1 to {device.gpu.sms}")
        known[name] = replace(device, sms=count)
    return tuple(known.values())


def _domains(rows: Any, devices: Sequence[Device], where: str) -> tuple[tuple[str, ...], ...]:
    """Groups of devices on one DRAM: partitions of one GPU, so all of one type, and in one group at most."""
    where = f"{where}: dram_domains"
    if not isinstance(rows, list) or not all(isinstance(row, list) and len(row) > 1 for row in rows):
        raise InputError(f'{where}: must be lists of two or more devices, [["a", "b"]]')
    known = {d.id: d for d in devices}
    domains = tuple(tuple(_known(name, set(known), where) for name in row) for row in rows)
    for name, count in Counter(name for domain in domains for name in domain).items():
        if count > 1:
            raise InputError(f"{where}: {shown(name)} is listed twice")
    for domain in domains:
        gpu = known[domain[0]].gpu
        if any(known[name].gpu != gpu for name in domain):
            raise InputError(f"{where}: {shown(domain[0])} and another of its group are not parts of one GPU")
        parts = [known[name].sms or 0 for name in domain]
        if sum(parts) > gpu.sms:
            raise InputError(f"{where}: {', '.join(domain)} have {sum(parts)} SMs together, a {gpu.name} {gpu.sms}")
    return domains


def _listed_links(rows: Any, ids: set[str], where: str) -> dict[frozenset[str], Link]:
    if not isinstance(rows, list):
        raise InputError(f"{where}: links must be a list of tables with a, b and kind or gbps")
    listed: dict[frozenset[str], Link] = {}
    for row in rows:
        row = _table(row, f"{where}: links")
        _only(row, _LINK_KEYS, f"{where}: links")
        a, b = (_known(row.get(end), ids, where) for end in ("a", "b"))
        pair = frozenset((a, b))
        if len(pair) < 2 or pair in listed:
            raise InputError(f"{where}: links: {a} - {b} is listed twice or joins a device to itself")
        if "kind" in row:
            kind = _link_kind(_text(row["kind"], f"{where}: kind"), where)
        elif "gbps" in row:
            kind = _link_kind(f"{_bandwidth(row['gbps'], f'{where}: {a} - {b}')!r}Gbps", where)
        else:
            raise InputError(f"{where}: links: {a} - {b} has neither kind nor gbps")
        listed[pair] = _stated(_link(a, b, kind), row, f"{where}: {a} - {b}")
    return listed


def _stated(link: Link, row: Mapping[str, Any], where: str) -> Link:
    """The link with the bandwidth and latency that its row states in place of the kind's."""
    gbps = _bandwidth(row["gbps"], where) if "gbps" in row else link.gbps
    latency = row.get("latency_us", link.latency_us)
    if not 0 <= _number(latency) <= MAX_LATENCY_US:
        raise InputError(f"{where}: {shown(latency)} is not a latency in us (0 to {MAX_LATENCY_US:g})")
    setup, in_order = row.get("setup_us", link.setup_us), row.get("in_order", link.in_order)
    if not 0 <= _number(setup) <= MAX_LATENCY_US:
        raise InputError(f"{where}: {shown(setup)} is not a setup in us (0 to {MAX_LATENCY_US:g})")
    if not isinstance(in_order, bool):
        raise InputError(f"{where}: in_order is true or false, not {shown(in_order)}")
    stated = [k for k in ("gbps", "latency_us", "setup_us", "in_order") if k in row]
    source = f"stated: {', '.join(stated)}; else {link.source}" if stated else link.source
    return Link(link.a, link.b, gbps, float(latency), link.kind, source, float(setup), in_order)


def _known(device: Any, ids: set[str], where: str) -> str:
    if not isinstance(device, str) or device not in ids:
        raise InputError(f"{where}: {shown(device)} is no device; there are {', '.join(sorted(ids))}")
    return device


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise InputError(f"{where}: {shown(value)} is not a text")
    return value


def _table(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise InputError(f"{where}: {shown(value)} is not a table")
    return value


def _only(table: Mapping[str, Any], keys: frozenset[str], where: str) -> None:
    extra = sorted(set(table) - keys)
    if extra:
        raise InputError(f"{where}: unknown key {shown(extra[0])}; known: {', '.join(sorted(keys))}")
