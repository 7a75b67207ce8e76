"""Seconds of a collective on the real links: measured curves where there are some, else α-β.

The forms are those of NCCL (its tuning model, src/graph/tuning.cc, and Hu et al., "Demystifying
NCCL", arXiv 2507.04786; the ring's are as in Thakur, Rabenseifner and Gropp, 2005). A ring of n
ranks takes n-1 steps, each over the link of that step, and 2n-2 where it reduces and gathers;
it carries (n-1)/n of the tensor a pass, and chunks follow one another, so the slowest link bounds
it: many rings together use the NVLinks and the NICs of all the group's devices. An all-reduce or
broadcast over nodes may also take a tree (a chain inside each node, log2 steps between them), and
where a switch adds up, each device sends and receives everything once; the quickest counts.
All-gather and reduce-scatter have only the ring, so that over many nodes a small reduce-scatter may
take longer than an all-reduce of the same size, as it does when measured. `size` is always the
bytes of the whole tensor.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from math import log2

from rlplace.cluster.types import Cluster, CollectiveCurve, CollectiveKind, Link

#: Share of a link's speed that an all-to-all reaches, for NCCL gives a pair of ranks fewer channels
#: than a ring; fitted, as the one below, by `benchmarks/collectives.py`.
EXCHANGE_SHARE = 0.78

#: Share of a link's speed that adding up in the switch reaches: NVLS on H200, where rings of the
#: same devices reach all of it.
SWITCH_SHARE = 0.73


#: Seconds of nothing, and of a byte of the whole tensor.
Line = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Ring:
    """What a group of ranks has to communicate over; equal for groups that cost the same.

    Args:
        ranks: Members of the group.
        per_node: Largest number of members on one node.
        nodes: Nodes that it spans.
        intra: Slowest link between members on one node, the bandwidth already what of the fabric
            lies inside the group.
        inter: Slowest link between its nodes, the bandwidth already a member's share.
        curves: Measured curves for this number of ranks.
        launch: Seconds that any collective costs, of the slowest kind of device.
        lines: What `seconds` has worked out: of each collective, the algorithms that it may take.
    """

    ranks: int
    per_node: int = 1
    nodes: int = 1
    intra: Link | None = None
    inter: Link | None = None
    curves: tuple[CollectiveCurve, ...] = ()
    launch: float = 0.0
    lines: dict[CollectiveKind, tuple[Line, ...]] = field(
        default_factory=dict, compare=False, repr=False
    )


def ring(cluster: Cluster, members: tuple[int, ...], busy: tuple[int, ...]) -> Ring:
    """How a group communicates while all devices of its mesh do the same.

    Args:
        cluster: The device graph.
        members: Devices of the group.
        busy: Devices of the whole mesh: those on one node share its NICs, those behind one host
            bridge the way to the others.
    """
    if len(members) == 1:
        return Ring(1)
    devices = cluster.devices
    on_node = Counter([devices[member].node for member in members])
    per_node = max(on_node.values())
    intra, inter = _slowest(cluster, members, on_node, busy)
    if inter is not None:
        inter = _scaled(inter, 1 / per_node)
    curves = tuple(curve for curve in cluster.curves if curve.ranks == len(members))
    return Ring(
        len(members), per_node, len(on_node), intra, inter, curves, _launch(cluster, members)
    )


def seconds(kind: CollectiveKind, size: float, group: Ring) -> float:
    """Seconds of a collective on `size` bytes (of the whole tensor)."""
    if group.ranks == 1 or size <= 0.0:
        return 0.0
    for curve in group.curves:
        if curve.kind == kind:
            return curve.seconds(size)
    lines = group.lines.get(kind)
    if lines is None:
        lines = group.lines[kind] = _lines(kind, group)
    best = float("inf")
    for fixed, per_byte in lines:
        if (taken := fixed + per_byte * size) < best:
            best = taken
    return best


def point_to_point(
    cluster: Cluster, source: tuple[int, ...], target: tuple[int, ...], size: float
) -> float:
    """Seconds until `target` holds `size` bytes that `source` holds.

    The ranks are cut into as many parallel streams as the smaller side has ranks; streams that
    leave or enter one node share its NICs, each stream has one of them at most, and streams that
    leave or enter one host bridge share its link.

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
    ends = [(_port(cluster, a, b), _port(cluster, b, a)) for a, b in pairs]
    leaving, coming = Counter([end[0] for end in ends]), Counter([end[1] for end in ends])
    worst = 0.0
    for (a, b), (out, into) in zip(pairs, ends, strict=True):
        link = cluster.link(a, b)
        speed = link.speed / max(leaving[out], coming[into], link.nics)
        if link.fabric != "switch":
            speed *= _inside(link, 2, cluster.node_sizes[cluster.devices[a].node])
        worst = max(worst, link.latency + size / streams / speed)
    return worst + _launch(cluster, source + target)


def _lines(kind: CollectiveKind, group: Ring) -> tuple[Line, ...]:
    """Seconds of the algorithms of a collective."""
    share = (group.ranks - 1) / group.ranks
    if kind == "all_to_all":
        found = [_exchange(group)]
    elif kind in {"all_gather", "reduce_scatter"}:
        found = [_around(1, share, group)]
    elif kind == "all_reduce":
        found = [_around(2, share, group), _down(2, group), *_by_switch(group)]
    else:
        found = [_around(1, 1.0, group), _down(1, group)]
    return tuple((group.launch + fixed, per_byte) for fixed, per_byte in found)


def _around(passes: int, sent: float, group: Ring) -> Line:
    """Passes of a ring in each of which a rank sends so much of the tensor."""
    steps = 0.0
    if group.intra is not None:
        steps = (group.ranks - group.nodes) * group.intra.latency
    if group.inter is not None:
        steps += (group.nodes - 1) * _step(group.inter)
    return passes * steps, passes * sent / _speed(group)


def _down(passes: int, group: Ring) -> Line:
    """Passes of a tree: along a chain inside each node, in log2 steps over the nodes."""
    return passes * _tree_steps(group), passes / _speed(group)


def _by_switch(group: Ring) -> tuple[Line, ...]:
    """An all-reduce in which switches add up where they can, and a tree or ring does elsewhere."""
    intra, inter = group.intra, group.inter
    if not ((intra and intra.reduces) or (inter and inter.reduces)):
        return ()
    inside = between = float("inf")
    steps = 2 * _tree_steps(group)
    if intra is not None and intra.reduces:
        inside = intra.speed * SWITCH_SHARE
        steps -= 2 * (group.per_node - 2) * intra.latency
    elif intra is not None:
        inside = intra.speed / 2 * group.per_node / (group.per_node - 1)
    if inter is not None and inter.reduces:
        between = inter.speed * group.per_node * SWITCH_SHARE
        steps -= 2 * (_rounds(group.nodes) - 1) * _branch(inter)
    elif inter is not None:
        between = _between(group, inter) / 2
        between *= group.nodes / (group.nodes - 1)
    return ((steps, 1 / min(inside, between)),)


def _exchange(group: Ring) -> Line:
    """An all-to-all: each rank sends 1/n of what it holds to every other, all at the same time."""
    piece = 1 / group.ranks / group.ranks / EXCHANGE_SHARE
    steps = inside = between = 0.0
    if group.intra is not None:
        steps = (group.per_node - 1) * group.intra.latency
        inside = (group.per_node - 1) * piece / group.intra.speed
    if group.inter is not None:
        steps += (group.nodes - 1) * _step(group.inter)
        between = (group.ranks - group.per_node) * piece / group.inter.speed
    return steps, max(inside, between)


def _speed(group: Ring) -> float:
    """Bytes/s of the slowest link of a group, over all channels."""
    if group.inter is None:
        assert group.intra is not None
        return group.intra.speed
    between = _between(group, group.inter)
    return between if group.intra is None else min(group.intra.speed, between)


def _between(group: Ring, inter: Link) -> float:
    """Bytes/s between nodes of all members of one together."""
    return inter.speed * group.per_node


def _tree_steps(group: Ring) -> float:
    steps = 0.0
    if group.intra is not None:
        steps = (group.per_node - 1) * group.intra.latency
    if group.inter is not None:
        steps += _rounds(group.nodes) * _branch(group.inter)
    return steps


def _step(inter: Link) -> float:
    """Seconds of a step of a collective from node to node."""
    return inter.latency + inter.relay


def _branch(inter: Link) -> float:
    """Seconds of a step of a tree, in which a node passes on what two others send."""
    return inter.latency + 2 * inter.relay


def _rounds(nodes: int) -> int:
    """log2, rounded up."""
    return (nodes - 1).bit_length()


def _launch(cluster: Cluster, members: tuple[int, ...]) -> float:
    if len(cluster.kinds) == 1:
        return cluster.kinds[0].collective_launch
    return max(cluster.kind(device).collective_launch for device in members)


def _crosses(cluster: Cluster, a: int, b: int) -> bool:
    return cluster.devices[a].node != cluster.devices[b].node


def _port(cluster: Cluster, a: int, b: int) -> tuple[int, int]:
    """What a message from `a` to `b` leaves by: its node, its host bridge, or itself alone."""
    node = cluster.devices[a].node
    if _crosses(cluster, a, b):
        return node, -1
    if _crosses_bridge(cluster, a, b):
        return node, -2 - cluster.bridge(a)
    return -1, a


def _crosses_bridge(cluster: Cluster, a: int, b: int) -> bool:
    """Whether two devices of a node, without a link of their own, are behind different bridges."""
    node = cluster.nodes[cluster.devices[a].node]
    if not node.bridge or cluster.link(a, b) is not node.intra:
        return False
    return cluster.bridge(a) != cluster.bridge(b)


def _inside(link: Link, ranks: int, devices: int) -> float:
    """Share of a device's bandwidth that joins it to its group of a node's devices."""
    if link.fabric == "switch" or ranks >= devices:
        return 1.0
    if link.fabric == "mesh":
        return (ranks - 1) / (devices - 1)
    return log2(ranks) / log2(devices)


def _scaled(link: Link, share: float) -> Link:
    if share == 1.0:
        return link
    return Link(
        link.bandwidth * share,
        link.latency,
        link.name,
        link.efficiency,
        1,
        link.reduces,
        link.fabric,
        link.relay,
    )


def _slowest(
    cluster: Cluster, members: tuple[int, ...], on_node: Counter[int], busy: tuple[int, ...]
) -> tuple[Link | None, Link | None]:
    """The slowest link inside a node, and the group's slowest share of a node's NICs.

    Neighbours in rank order decide (a ring uses no other pairs), which is exact for links that
    belong to nodes and takes linear time.
    """
    devices = cluster.devices
    sharing = Counter([devices[device].node for device in busy])
    intra: Link | None = None
    inter: Link | None = None
    seen: set[tuple[int, int]] = set()
    # Where no pair has a link of its own, all pairs of two nodes are alike.
    alike = not cluster.overrides
    for a, b in zip(members, (*members[1:], members[0]), strict=True):
        nodes = devices[a].node, devices[b].node
        if nodes in seen:
            continue
        link = cluster.link(a, b)
        if nodes[0] != nodes[1]:
            share = min(on_node[node] / max(sharing[node], link.nics) for node in nodes)
            link = _scaled(link, share)
            inter = link if inter is None or link.speed < inter.speed else inter
        else:
            share = _inside(link, on_node[nodes[0]], cluster.node_sizes[nodes[0]])
            if bridged := cluster.nodes[nodes[0]].bridge:
                share /= _groups_at_bridge(cluster, (a, b), members, busy)
            link = _scaled(link, share)
            intra = link if intra is None or link.speed < intra.speed else intra
            if bridged:
                continue
        if alike:
            seen.add(nodes)
    return intra, inter


def _groups_at_bridge(
    cluster: Cluster, edge: tuple[int, int], members: tuple[int, ...], busy: tuple[int, ...]
) -> float:
    """Groups that go through the busier of the host bridges at the ends of a ring's edge.

    An edge between two devices of one bridge is not shared. However many of its members are behind
    a bridge, a ring enters and leaves it once.
    """
    most = 1.0
    if not _crosses_bridge(cluster, *edge):
        return most
    for end in edge:
        place = cluster.devices[end].node, cluster.bridge(end)
        there = [
            sum((cluster.devices[d].node, cluster.bridge(d)) == place for d in group)
            for group in (busy, members)
        ]
        most = max(most, there[0] / there[1])
    return most
