"""Clusters from text: the short form, and YAML files with device kinds and links of one's own.

A file is either one line, ``short: 4x8xA100-80``, or

    kinds:                       # only kinds that the catalogue lacks
      - {name: A100-slow, base: A100-80, peak_flops: {bf16: 250 TFLOP/s, fp32: 19.5 TFLOP/s}}
    nodes:
      - count: 4
        devices: {A100-slow: 8}
        intra: nvlink            # or {bandwidth: 300 GB/s, latency: 3 us}
        nic: ib200               # or {bandwidth: 200 Gb/s, latency: 14 us}
        bridge: 4                # devices that share a host bridge (0, the default: none)
    overrides:
      - {between: [0, 1], bandwidth: 56 GB/s, latency: 4 us}
    curves:                      # measured collectives, as `rlplace discover` writes them
      - {kind: all_reduce, ranks: 8, latency: 30 us, seconds_per_byte: 7.0e-12}

Bandwidths are those of one direction; `nic` is what a whole node has towards the others. What is
not said comes from the catalogue; `describe_assumptions` lists it.

A link that is written out may also say `efficiency` (share of the bandwidth that a large collective
reaches, 1 by default), `nics` (parts of it, of which a message between two devices gets one, 1),
`reduces` (its switch adds up, false), `fabric` (`switch`, `mesh` or `cube`, how the devices of a
node share it) and `relay` (time more that a step of a collective takes from node to node, 0).
"""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path

from pydantic import ValidationError

from rlplace.cluster.assemble import HostSpec, assemble
from rlplace.cluster.catalogue import ENTRIES, device_kind
from rlplace.cluster.dump import dump_cluster
from rlplace.cluster.links import default_links, link_place, named_link
from rlplace.cluster.schema import ClusterModel, KindModel, LinkModel, NodeModel
from rlplace.cluster.short import parse_cluster
from rlplace.cluster.types import Cluster, CollectiveCurve, DeviceKind, Link
from rlplace.cluster.yaml_text import YamlText, parse_yaml
from rlplace.errors import InputError
from rlplace.units import format_bytes, format_seconds

__all__ = ["describe_assumptions", "load_cluster", "parse_cluster", "read_cluster", "save_cluster"]

#: A host with more than this (8,000 Gb/s) or a node link with less is a mistaken unit.
FASTEST_NIC = 1000e9
SLOWEST_INTRA = 1e9


def load_cluster(path: str | Path) -> Cluster:
    """A cluster from a YAML file.

    Args:
        path: The file; its form is in the docstring of this module.

    Raises:
        InputError: If the file is missing or is not such a file; the field names the line.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError("cluster", str(path), f"the file cannot be read: {error}") from error
    return read_cluster(text, path.name)


def save_cluster(cluster: Cluster, path: str | Path) -> None:
    """Write a cluster as YAML that loads to an equal one (same fingerprint).

    Raises:
        InputError: If the cluster cannot be said in a file (devices out of the order of nodes).
    """
    text = dump_cluster(cluster)
    if read_cluster(text, "the file").fingerprint != cluster.fingerprint:
        rule = "devices are numbered node after node, and only kinds that occur are listed"
        raise InputError("cluster", cluster.name, f"has no form as a file: {rule}")
    Path(path).write_text(text, encoding="utf-8")


def read_cluster(text: str, source: str = "cluster") -> Cluster:
    """A cluster from the text of a cluster file.

    Args:
        text: YAML.
        source: What to call it in messages.

    Raises:
        InputError: As `load_cluster`.
    """
    parsed = parse_yaml(text, source)
    try:
        model = ClusterModel.model_validate(parsed.content)
    except ValidationError as error:
        raise parsed.error(error) from error
    if model.short is None:
        return _from_nodes(model, parsed)
    if others := sorted(parsed.content.keys() - {"short", "name"}):
        with parsed.at(others[0]):
            raise InputError(others[0], parsed.content[others[0]], "short stands alone")
    with parsed.at("short"):
        cluster = parse_cluster(model.short)
    return replace(cluster, name=model.name) if model.name else cluster


def describe_assumptions(cluster: Cluster) -> tuple[str, ...]:
    """What of a cluster came from the catalogue, one line a kind and a link.

    Args:
        cluster: Any cluster; what equals an entry of the catalogue counts as coming from it.
    """
    lines = []
    catalogued = [kind for kind in cluster.kinds if _is_catalogued(kind)]
    for kind in catalogued:
        peaks = ", ".join(f"{peak / 1e12:g} {dtype}" for dtype, peak in kind.peak_flops.items())
        memory = f"{format_bytes(kind.memory)} at {kind.bandwidth / 1e9:g} GB/s"
        source = ENTRIES[kind.name].source
        lines.append(f"{kind.name}: {memory}, TFLOP/s: {peaks} ({source})")
    usual = {link for kind in catalogued for link in default_links(kind.name)}
    places = [("inside a node", node.intra) for node in cluster.nodes]
    places += [("of a node", node.nic) for node in cluster.nodes if node.nic is not None]
    for where, link in dict.fromkeys(places):
        if link in usual:
            speed = f"{link.bandwidth / 1e9:g} GB/s a direction"
            latency = f"{format_seconds(link.latency)} a message"
            reached = f"{link.efficiency:.0%} of it in large collectives"
            lines.append(f"link {where}: {link.name}, {speed}, {reached}, {latency}")
    return tuple(lines)


def _is_catalogued(kind: DeviceKind) -> bool:
    return kind.name in ENTRIES and ENTRIES[kind.name].kind == kind


def _from_nodes(model: ClusterModel, parsed: YamlText) -> Cluster:
    """A cluster from a checked file that lists nodes."""
    kinds: dict[str, DeviceKind] = {}
    bases: dict[str, str] = {}
    for number, own in enumerate(model.kinds):
        with parsed.at("kinds", number):
            if own.name in kinds:
                raise InputError("name", own.name, "two kinds have this name")
            base = None if own.base is None else device_kind(own.base)
            kinds[own.name] = _kind(own, base)
            bases[own.name] = "" if base is None else base.name
    hosts = []
    for number, node in enumerate(model.nodes):
        devices = _devices(node, number, kinds, parsed)
        hosts.append(_host(node, number, devices, bases, parsed))
    _warn_unused(kinds, hosts)
    cluster = assemble(
        hosts,
        kinds,
        bases=bases,
        overrides=[(*o.between, o.link()) for o in model.overrides],
        curves=[CollectiveCurve(**curve.model_dump()) for curve in model.curves],
        name=model.name,
    )
    _warn_units(cluster)
    return cluster


def _kind(own: KindModel, base: DeviceKind | None) -> DeviceKind:
    """A kind of the file's own."""
    given = own.model_dump(exclude={"base"}, exclude_none=True)
    for key in {"memory", "reserve"} & given.keys():
        given[key] = int(given[key])
    if base is not None:
        return replace(base, **given)
    if missing := [key for key in ("memory", "peak_flops", "bandwidth") if key not in given]:
        rule = f"a kind without base says its {', '.join(missing)}"
        raise InputError("kinds", own.name, rule, "base: A100-80")
    return DeviceKind(**given)


def _devices(
    node: NodeModel, number: int, kinds: dict[str, DeviceKind], parsed: YamlText
) -> tuple[tuple[str, int | None], ...]:
    """Kind and core of each device of a host; kinds of the catalogue are added to `kinds`."""
    found: list[tuple[str, int | None]] = []
    for place, entry in enumerate(node.devices):
        name = entry.kind
        if name not in kinds:
            with parsed.at("nodes", number, "devices", place):
                kind = device_kind(name)
            name = kind.name
            kinds.setdefault(name, kind)
        found += [(name, entry.core)] * entry.count
    return tuple(found)


def _host(
    node: NodeModel,
    number: int,
    devices: tuple[tuple[str, int | None], ...],
    bases: dict[str, str],
    parsed: YamlText,
) -> HostSpec:
    """The hosts of one entry of `nodes`."""
    origins = dict.fromkeys(bases.get(kind, kind) for kind, _ in devices)
    links: dict[str, Link | None] = {}
    for place, given in (("intra", node.intra), ("nic", node.nic)):
        with parsed.at("nodes", number, place):
            links[place] = None if given is None else _link(given, place, list(origins))
    field = parsed.field(("nodes", number))
    return HostSpec(node.count, devices, links["intra"], links["nic"], node.bridge, field)


def _link(given: str | LinkModel, place: str, origins: list[str]) -> Link:
    """A link as the file gives it, by name or written out."""
    if isinstance(given, LinkModel):
        return given.link()
    if link_place(given) != place:
        legal = "nvlink, pcie" if place == "intra" else "ib200, eth25"
        raise InputError(place, given, f"is not a link for {place}", legal)
    if place == "intra" and not all(origins):
        rule = "a kind without base has no link of that name; write bandwidth and latency"
        raise InputError(place, given, rule, "{bandwidth: 25 GB/s, latency: 5 us}")
    return named_link(given, origins)


def _warn_unused(kinds: dict[str, DeviceKind], hosts: list[HostSpec]) -> None:
    unused = kinds.keys() - {kind for host in hosts for kind, _ in host.devices}
    if unused:
        warnings.warn(f"no device is of kind {', '.join(sorted(unused))}", stacklevel=4)


def _warn_units(cluster: Cluster) -> None:
    """Warn where a bandwidth is so far out that bits and bytes were probably mixed up."""
    for nic in dict.fromkeys(node.nic for node in cluster.nodes):
        if nic is not None and nic.bandwidth > FASTEST_NIC:
            speed = f"{nic.bandwidth / 1e9:g} GB/s, which is {nic.bandwidth / 125e6:g} Gb/s"
            text = f"a nic has {speed}: networks are usually said in Gb/s (bits)"
            warnings.warn(text, stacklevel=4)
    # Measured curves replace the link model, and a CPU's own "link" may well be slow.
    for intra in dict.fromkeys(node.intra for node in cluster.nodes if not cluster.curves):
        if intra.bandwidth < SLOWEST_INTRA:
            speed = f"{intra.bandwidth / 1e9:g} GB/s"
            warnings.warn(f"an intra link has only {speed}: bits by mistake?", stacklevel=4)
