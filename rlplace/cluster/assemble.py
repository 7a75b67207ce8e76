"""From hosts, as a person describes them, to a `Cluster`; the catalogue fills what is not said."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from rlplace.cluster.links import default_links
from rlplace.cluster.types import Cluster, CollectiveCurve, Device, DeviceKind, Link, Node
from rlplace.errors import InputError

#: More than any planner here is made for; a mistyped count should not fill the memory.
MAX_DEVICES = 65536


@dataclass(frozen=True, slots=True)
class HostSpec:
    """`count` equal hosts.

    Args:
        count: Number of hosts.
        devices: Kind and core of each device of one host (see `Device.core`).
        intra: Link between its devices, None for the usual one of its kinds.
        nic: Link towards other hosts, None for the usual one of its kinds.
        bridge: Devices behind one host bridge (see `Node.bridge`).
        field: How the person wrote this part, for messages.
    """

    count: int
    devices: tuple[tuple[str, int | None], ...]
    intra: Link | None = None
    nic: Link | None = None
    bridge: int = 0
    field: str = "nodes"


def assemble(
    hosts: Sequence[HostSpec],
    kinds: Mapping[str, DeviceKind],
    *,
    bases: Mapping[str, str] | None = None,
    overrides: Sequence[tuple[int, int, Link]] = (),
    curves: Sequence[CollectiveCurve] = (),
    name: str = "",
) -> Cluster:
    """The cluster of some hosts; devices get their ranks in the order of the hosts.

    Links that are not said are the slowest usual ones among the kinds of the host; a cluster of
    one host needs no NIC and gets none.

    Args:
        hosts: In the order of their ranks.
        kinds: Every kind that occurs, by name; their order is that of `Cluster.kinds`.
        bases: For kinds that are not of the catalogue, the kind whose usual links they have.
        overrides: Links of single pairs of devices.
        curves: Measured collectives.
        name: How the cluster was asked for.

    Raises:
        InputError: If there is no device, too many, a link that nothing says, or an override of
            a device that does not exist.
    """
    total = sum(host.count * len(host.devices) for host in hosts)
    if not 0 < total <= MAX_DEVICES:
        raise InputError("devices", total, f"a cluster has 1 to {MAX_DEVICES} devices", "8xA100-80")
    alone = sum(host.count for host in hosts) == 1
    origin = dict(bases or {})
    devices: list[Device] = []
    nodes: list[Node] = []
    for host in hosts:
        intra = host.intra or _usual(host, origin, "intra", lambda kind: default_links(kind)[0])
        nic = host.nic
        if nic is None and not alone:
            nic = _usual(host, origin, "nic", lambda kind: default_links(kind)[1])
        for _ in range(host.count):
            for kind, core in host.devices:
                devices.append(Device(len(devices), kind, len(nodes), core))
            nodes.append(Node(len(nodes), intra, nic, host.bridge))
    used = {device.kind for device in devices}
    return Cluster(
        devices=tuple(devices),
        nodes=tuple(nodes),
        kinds=tuple(kind for name, kind in kinds.items() if name in used),
        overrides=_checked_overrides(overrides, total),
        curves=tuple(curves),
        name=name,
    )


def _usual(
    host: HostSpec, origin: Mapping[str, str], place: str, link: Callable[[str], Link]
) -> Link:
    """The slowest of the usual links of a host's kinds."""
    links = []
    for kind in dict.fromkeys(kind for kind, _ in host.devices):
        base = origin.get(kind, kind)
        if not base:
            between = "the devices of a node" if place == "intra" else "nodes"
            rule = f"the link between {between} is missing, and {kind} has no usual one"
            example = "nvlink, pcie" if place == "intra" else "ib200, eth25"
            raise InputError(f"{host.field}.{place}", None, rule, example)
        links.append(link(base))
    return min(links, key=lambda candidate: candidate.speed)


def _checked_overrides(
    overrides: Sequence[tuple[int, int, Link]], total: int
) -> tuple[tuple[int, int, Link], ...]:
    """Overrides with the smaller index first, each pair once."""
    found: dict[tuple[int, int], Link] = {}
    for number, (a, b, link) in enumerate(overrides):
        field = f"overrides[{number}].between"
        for device in (a, b):
            if not 0 <= device < total:
                rule = f"device {device} does not exist, the cluster has 0 to {total - 1}"
                nearest = [min(max(end, 0), total - 1) for end in (a, b)]
                raise InputError(field, [a, b], rule, nearest)
        pair = (min(a, b), max(a, b))
        if a == b or pair in found:
            raise InputError(field, [a, b], "an override joins two devices, each pair once")
        found[pair] = link
    return tuple((a, b, link) for (a, b), link in found.items())
