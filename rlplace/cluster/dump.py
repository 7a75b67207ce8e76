"""A cluster as the text of a cluster file, with units and names where they say it exactly."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, fields
from itertools import groupby
from typing import Any

import yaml

from rlplace.cluster.catalogue import DEVICE_KINDS
from rlplace.cluster.links import named_link
from rlplace.cluster.schema import parse_flops
from rlplace.cluster.types import Cluster, CollectiveCurve, DeviceKind, Link
from rlplace.errors import InputError
from rlplace.units import parse_bandwidth, parse_time


def dump_cluster(cluster: Cluster) -> str:
    """YAML of a cluster (see `rlplace.cluster.load`); numbers are kept to the last bit."""
    content: dict[str, Any] = {"name": cluster.name} if cluster.name else {}
    appearance = list(dict.fromkeys(device.kind for device in cluster.devices))
    plain = [kind.name for kind in cluster.kinds] == appearance
    if not plain or any(DEVICE_KINDS.get(kind.name) != kind for kind in cluster.kinds):
        content["kinds"] = [_kind(kind) for kind in cluster.kinds]
    content["nodes"] = _nodes(cluster)
    if cluster.overrides:
        content["overrides"] = [
            {"between": [a, b]} | _written_out(link) for a, b, link in cluster.overrides
        ]
    if cluster.curves:
        content["curves"] = [_curve(curve) for curve in cluster.curves]
    return yaml.dump(content, Dumper=_Dumper, sort_keys=False, width=100)


class _Dumper(yaml.SafeDumper):
    """Writes mappings and lists of plain values on one line; repeats, never aliases."""

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def represent_mapping(self, tag: str, mapping: Any, flow_style: bool | None = None) -> Any:
        node = super().represent_mapping(tag, mapping, flow_style)
        node.flow_style = all(isinstance(value, yaml.ScalarNode) for _, value in node.value)
        return node

    def represent_sequence(self, tag: str, sequence: Any, flow_style: bool | None = None) -> Any:
        node = super().represent_sequence(tag, sequence, flow_style)
        node.flow_style = all(isinstance(value, yaml.ScalarNode) for value in node.value)
        return node


def _unit(
    value: float, scale: float, unit: str, parse: Callable[[str, str | float], float]
) -> str | float:
    """The value with a unit if that reads back to the same number, else the bare number."""
    text = f"{value / scale:.12g} {unit}"
    return text if value > 0 and parse("value", text) == value else float(value)


def _kind(kind: DeviceKind) -> dict[str, Any]:
    """A kind, by name if it is the catalogue's own, else written out."""
    if DEVICE_KINDS.get(kind.name) == kind:
        return {"name": kind.name, "base": kind.name}
    peaks = {k: _unit(v, 1e12, "TFLOP/s", parse_flops) for k, v in kind.peak_flops.items()}
    return asdict(kind) | {
        "memory": kind.memory if kind.memory % 2**30 else f"{kind.memory // 2**30} GiB",
        "peak_flops": peaks,
        "bandwidth": _unit(kind.bandwidth, 1e9, "GB/s", parse_bandwidth),
        "launch_overhead": _unit(kind.launch_overhead, 1e-6, "us", parse_time),
        "half_flops": _unit(kind.half_flops, 1e9, "GFLOP", parse_flops),
        "host_bandwidth": _unit(kind.host_bandwidth, 1e9, "GB/s", parse_bandwidth),
        "collective_launch": _unit(kind.collective_launch, 1e-6, "us", parse_time),
    }


def _curve(curve: CollectiveCurve) -> dict[str, Any]:
    """A measured collective."""
    entry = asdict(curve) | {"latency": _unit(curve.latency, 1e-6, "us", parse_time)}
    return entry if curve.points else {key: entry[key] for key in entry if key != "points"}


def _nodes(cluster: Cluster) -> list[dict[str, Any]]:
    """The hosts, neighbours that are equal as one entry with a count."""
    numbers = [device.node for device in cluster.devices]
    if numbers != sorted(numbers) or set(numbers) != set(range(len(cluster.nodes))):
        rule = "a file numbers devices node after node, and every node has one"
        raise InputError("cluster", cluster.name, rule)
    catalogued = {kind.name for kind in cluster.kinds if DEVICE_KINDS.get(kind.name) == kind}
    entries = []
    hosts = [list(host) for _, host in groupby(cluster.devices, lambda device: device.node)]
    for node, host in zip(cluster.nodes, hosts, strict=True):
        devices = [(device.kind, device.core) for device in host]
        kinds = {kind for kind, _ in devices}
        known = kinds if kinds <= catalogued else None
        entry: dict[str, Any] = {"devices": _devices(devices), "intra": _link(node.intra, known)}
        entry |= {"nic": _link(node.nic, known)} if node.nic else {}
        entries.append(entry | ({"bridge": node.bridge} if node.bridge else {}))
    runs = [list(run) for _, run in groupby(entries)]
    return [({"count": len(run)} if len(run) > 1 else {}) | run[0] for run in runs]


def _devices(devices: list[tuple[str, int | None]]) -> dict[str, int] | list[dict[str, Any]]:
    """Devices of a host: kind and count, or a list where order or cores matter."""
    runs = [(key, len(list(group))) for key, group in groupby(devices)]
    if all(core is None for _, core in devices) and len({kind for (kind, _), _ in runs}) == len(
        runs
    ):
        return {kind: count for (kind, _), count in runs}
    return [
        {"kind": kind}
        | ({"count": count} if count > 1 else {})
        | ({} if core is None else {"core": core})
        for (kind, core), count in runs
    ]


def _link(link: Link, kinds: set[str] | None) -> str | dict[str, Any]:
    """A link by its name, if that name means the same to the catalogue, else written out."""
    with suppress(InputError):
        if kinds is not None and named_link(link.name, kinds) == link:
            return link.name
    return _written_out(link)


def _written_out(link: Link) -> dict[str, Any]:
    """All that differs from the defaults of a link."""
    plain = Link(link.bandwidth, link.latency)
    said = {f.name: getattr(link, f.name) for f in fields(link)}
    return {key: value for key, value in said.items() if value != getattr(plain, key)} | {
        "bandwidth": _unit(link.bandwidth, 1e9, "GB/s", parse_bandwidth),
        "latency": _unit(link.latency, 1e-6, "us", parse_time),
        **({"relay": _unit(link.relay, 1e-6, "us", parse_time)} if link.relay else {}),
    }
