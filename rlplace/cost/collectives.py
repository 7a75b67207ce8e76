"""Seconds of a collective on the real links: measured curves where there are some, else α-β.

The α-β forms are those of Thakur, Rabenseifner and Gropp, "Optimization of Collective
Communication Operations in MPICH" (2005); a group that spans nodes works hierarchically: inside
the nodes first, then between nodes on each member's share of the NIC. `size` is always the bytes
of the whole tensor.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from math import ceil, log2

from rlplace.cluster.types import Cluster, CollectiveCurve, CollectiveKind, Link

#: Passes over the data of each collective: an all-reduce is a reduce-scatter and an all-gather.
_PASSES: dict[str, int] = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1, "broadcast": 1}


@dataclass(frozen=True, slots=True)
class Ring:
    """What a group of ranks has to communicate over; equal for groups that cost the same.

    Args:
        ranks: Members of the group.
        per_node: Largest number of members on one node.
        nodes: Nodes that it spans.
        intra: Slowest link between members on one node.
        inter: Slowest link between its nodes, the bandwidth already a member's share.
        curves: Measured curves for this number of ranks.
    """

    ranks: int
    per_node: int = 1
    nodes: int = 1
    intra: Link | None = None
    inter: Link | None = None
    curves: tuple[CollectiveCurve, ...] = ()


def ring(cluster: Cluster, members: tuple[int, ...], busy: tuple[int, ...]) -> Ring:
    """How a group communicates while all devices of its mesh do the same.

    Args:
        cluster: The device graph.
        members: Devices of the group.
        busy: Devices of the whole mesh: those on one node share its NIC.
    """
    if len(members) == 1:
        return Ring(1)
    on_node = Counter(cluster.devices[device].node for device in members)
    sharing = Counter(cluster.devices[device].node for device in busy)
    intra, inter = _slowest(cluster, members, sharing)
    curves = tuple(curve for curve in cluster.curves if curve.ranks == len(members))
    per_node = max(on_node.values())
    return Ring(len(members), per_node, len(on_node), intra, inter, curves)


def seconds(kind: CollectiveKind, size: float, group: Ring) -> float:
    """Seconds of a collective on `size` bytes (of the whole tensor)."""
    if group.ranks == 1 or size <= 0.0:
        return 0.0
    for curve in group.curves:
        if curve.kind == kind:
            return curve.seconds(size)
    if group.nodes == 1 or group.intra is None:
        link = group.intra if group.nodes == 1 else group.inter
        assert link is not None
        return _flat(kind, size, group.ranks, link)
    assert group.inter is not None
    # In an all-to-all a node's members exchange only what the node's own ranks hold.
    held = size / group.nodes if kind == "all_to_all" else size
    inside = _flat(kind, held, group.per_node, group.intra)
    return inside + _flat(kind, size / group.per_node, group.nodes, group.inter)


def point_to_point(
    cluster: Cluster, source: tuple[int, ...], target: tuple[int, ...], size: float
) -> float:
    """Seconds until `target` holds `size` bytes that `source` holds.

    The ranks are cut into as many parallel streams as the smaller side has ranks; streams that
    leave or enter one node share its NIC.

    Args:
        cluster: The device graph.
        source: Sending devices, each with an equal part.
        target: Receiving devices, each wanting an equal part.
        size: Bytes of all parts.
    """
    streams = min(len(source), len(target))
    pairs = [
        (source[i * len(source) // streams], target[i * len(target) // streams])
        for i in range(streams)
    ]
    if pairs == [(device, device) for device, _ in pairs] or size <= 0.0:
        return 0.0
    curve = next((c for c in cluster.curves if c.kind == "p2p"), None)
    if curve is not None:
        return curve.seconds(size / streams)
    crossing = [pair for pair in pairs if _crosses(cluster, *pair)]
    leaving = Counter(cluster.devices[a].node for a, _ in crossing)
    coming = Counter(cluster.devices[b].node for _, b in crossing)
    worst = 0.0
    for a, b in pairs:
        link = cluster.link(a, b)
        on_nic = max(leaving[cluster.devices[a].node], coming[cluster.devices[b].node])
        shared = on_nic if _crosses(cluster, a, b) else 1
        worst = max(worst, link.latency + size / streams * shared / link.bandwidth)
    return worst


def _flat(kind: CollectiveKind, size: float, ranks: int, link: Link) -> float:
    if ranks == 1:
        return 0.0
    share = (ranks - 1) / ranks
    if kind == "all_to_all":
        return (ranks - 1) * link.latency + share * size / ranks / link.bandwidth
    passes = _PASSES.get(kind, 1)
    rounds = ceil(log2(ranks))
    by_ring = (ranks - 1) * link.latency + share * size / link.bandwidth
    by_tree = rounds * link.latency + rounds * size / link.bandwidth
    return passes * min(by_ring, by_tree)


def _crosses(cluster: Cluster, a: int, b: int) -> bool:
    return cluster.devices[a].node != cluster.devices[b].node


def _slowest(
    cluster: Cluster, members: tuple[int, ...], sharing: Counter[int]
) -> tuple[Link | None, Link | None]:
    """The slowest link inside a node, and the slowest share of a NIC between nodes.

    Neighbours in rank order decide (a ring uses no other pairs), which is exact for links that
    belong to nodes and takes linear time.
    """
    intra: Link | None = None
    inter: Link | None = None
    closed = (*members[1:], members[0])
    for a, b in zip(members, closed, strict=True):
        link = cluster.link(a, b)
        if not _crosses(cluster, a, b):
            if intra is None or link.bandwidth < intra.bandwidth:
                intra = link
            continue
        node_a, node_b = cluster.devices[a].node, cluster.devices[b].node
        streams = max(sharing[node_a], sharing[node_b])
        share = Link(link.bandwidth / streams, link.latency, link.name)
        if inter is None or share.bandwidth < inter.bandwidth:
            inter = share
    return intra, inter
