"""Links by name: those inside a host of a kind, and networks of so many Gb/s.

A link's bandwidth is that of ONE direction, of one device inside a node and of the whole host
outside: datasheets give both directions together ("NVLink 600 GB/s" is 300 GB/s here). They are
wire figures; `Link.efficiency` says what a large collective reaches of them. The constants of
`LINK_KINDS` are fitted by `benchmarks/collectives.py`, whose docstring says to which published
measurements and which of them it keeps apart.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace

from rlplace.cluster.calibrated import calibrated_link
from rlplace.cluster.catalogue import PCIE, catalogue_entry
from rlplace.cluster.types import Link
from rlplace.errors import InputError, nearest_names


@dataclass(frozen=True, slots=True)
class LinkKind:
    """A family of links.

    Args:
        place: ``intra`` joins the devices of a node, ``nic`` nodes.
        latency: Seconds a message or a step.
        efficiency: Share of the wire that a large collective reaches, for NVLink times
            `NVLINK_EFFICIENCY`.
        relay: Seconds more that a step of a collective takes from node to node.
    """

    place: str
    latency: float
    efficiency: float
    relay: float = 0.0


#: By family; those of networks (``ib`` InfiniBand, ``eth`` Ethernet with TCP, ``efa`` AWS's
#: fabric, ``opa`` Omni-Path) are followed by the total Gb/s of a node in one direction. Fitted but
#: for the latencies of PCIe (NCCL, src/graph/tuning.cc), EFA (a message of SRD) and Omni-Path
#: (as InfiniBand).
LINK_KINDS: dict[str, LinkKind] = {
    "nvlink": LinkKind("intra", 5.7e-6, 1.0),
    "pcie": LinkKind("intra", 5.7e-6, 0.65),
    "ib": LinkKind("nic", 2.7e-6, 0.93),
    "eth": LinkKind("nic", 72e-6, 0.94),
    "efa": LinkKind("nic", 15e-6, 0.68, relay=2.9e-4),
    "opa": LinkKind("nic", 2.7e-6, 0.4),
}

#: Efficiency of NVLink by generation, and of Infinity Fabric (0). Fitted.
NVLINK_EFFICIENCY = {0: 0.7, 2: 0.88, 3: 0.76, 4: 0.81, 5: 0.76}

#: Of PCIe, where cards without peer access (GeForce) go through the memory of the host: every byte
#: crosses its bridge twice.
STAGED = 0.5

#: NICs behind the total of a node that has so many Gb/s or more (eight ports of 200 or 400 Gb/s
#: in a DGX A100 or H100, four of 100 in a DGX-1); Ethernet has one.
NICS = ((1600.0, 8), (400.0, 4))

#: Names of links that a message can offer (any other number of Gb/s is legal too).
LINK_NAMES = (
    "nvlink", "pcie", "ib200", "ib400", "ib1600", "ib3200", "eth10", "eth25", "eth100", "efa3200",
    "opa400",
)  # fmt: skip


def link_place(name: str) -> str:
    """``intra`` or ``nic``: which of a node's links a name such as ``pcie`` or ``ib200`` means.

    Raises:
        InputError: If the name is not one of `LINK_KINDS`, or a network lacks its Gb/s.
    """
    return LINK_KINDS[_family(name)[0]].place


def network_link(name: str) -> Link:
    """The link of a host towards the others: ``ib3200`` is 3200 Gb/s, 400 GB/s, a direction.

    Raises:
        InputError: If the name is not of a network, or its number is not positive.
    """
    family, gigabits = _family(name)
    if LINK_KINDS[family].place != "nic":
        raise InputError("link", name, "joins devices of a node, not nodes", "ib200, eth25")
    own = LINK_KINDS[family]
    nics = 1 if family == "eth" else next((n for least, n in NICS if gigabits >= least), 1)
    bandwidth = gigabits * 1e9 / 8
    link = Link(bandwidth, own.latency, name.lower(), own.efficiency, nics, relay=own.relay)
    return calibrated_link(link)


def node_link(name: str, kind: str) -> Link:
    """The link between two devices of a kind inside a node, in one direction.

    Args:
        name: ``nvlink`` or ``pcie``.
        kind: Name of a catalogue kind.

    Raises:
        InputError: If the name is not of a link inside a node, or the kind does not have it.
    """
    family, _ = _family(name)
    entry = catalogue_entry(kind)
    if LINK_KINDS[family].place != "intra":
        raise InputError("link", name, "joins nodes, not the devices of a node", "nvlink, pcie")
    if family == "nvlink" and not entry.nvlink:
        rule = f"{entry.kind.name} has no NVLink that joins all devices of a host"
        raise InputError("link", name, rule, "pcie, or a pairwise override in a cluster file")
    own = LINK_KINDS[family]
    if family == "pcie":
        link = calibrated_link(Link(PCIE[entry.pcie], own.latency, family, own.efficiency))
        return link if entry.peers else replace(link, efficiency=link.efficiency * STAGED)
    return calibrated_link(
        Link(
            entry.nvlink / 2,
            own.latency,
            family,
            own.efficiency * NVLINK_EFFICIENCY[entry.generation],
            reduces=entry.reduces,
            fabric=entry.fabric,
        )
    )


def named_link(name: str, kinds: Iterable[str]) -> Link:
    """The link that a name means for a host with devices of these kinds (the slowest of them).

    Raises:
        InputError: If there is no such link, or a kind does not have it.
    """
    if link_place(name) == "nic":
        return network_link(name)
    return min((node_link(name, kind) for kind in kinds), key=lambda link: link.speed)


def default_links(kind: str) -> tuple[Link, Link]:
    """The links of a usual host with such devices: inside it, and towards other hosts."""
    entry = catalogue_entry(kind)
    inside = node_link("nvlink" if entry.nvlink else "pcie", kind)
    return inside, network_link(entry.nic)


def _family(name: str) -> tuple[str, float]:
    """Family and Gb/s of a link name (0 inside a node)."""
    match = re.fullmatch(r"(nvlink|pcie)|(ib|eth|efa|opa)(\d+(?:\.\d+)?)", name.lower())
    if match is None or (match[3] and not float(match[3])):
        rule = "is not a link; networks are followed by the Gb/s of a node, above zero"
        nearest = nearest_names(name, LINK_NAMES) or ", ".join(LINK_NAMES)
        raise InputError("link", name, rule, nearest)
    return (match[1], 0.0) if match[1] else (match[2], float(match[3]))
