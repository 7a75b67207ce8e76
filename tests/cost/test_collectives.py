"""Collectives against formulas worked out by hand, and laws that hold for all of them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlplace.cluster.types import Cluster, CollectiveCurve, CollectiveKind, Link
from rlplace.cost.collectives import (
    EXCHANGE_SHARE,
    SWITCH_SHARE,
    Ring,
    point_to_point,
    ring,
    seconds,
)
from rlplace.plan.testing import cluster, round_kind

_SIZE = 1e9
_KIND = round_kind()
_FAST, _SLOW = Link(100e9, 1e-6), Link(10e9, 5e-6)
#: Two nodes of four devices.
_TWO = cluster([[_KIND] * 4] * 2, intra=_FAST, nic=_SLOW)
_ALL = tuple(range(8))

kinds = st.sampled_from(["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast"])
sizes = st.floats(1.0, 1e11)


@pytest.mark.parametrize(
    ("kind", "wanted"),
    [
        ("all_reduce", 2 * (3 * 1e-6 + 3 / 4 * _SIZE / 100e9)),
        ("all_gather", 3 * 1e-6 + 3 / 4 * _SIZE / 100e9),
        ("reduce_scatter", 3 * 1e-6 + 3 / 4 * _SIZE / 100e9),
        ("all_to_all", 3 * 1e-6 + 3 / 4 * _SIZE / 4 / (100e9 * EXCHANGE_SHARE)),
        ("broadcast", 3 * 1e-6 + _SIZE / 100e9),
    ],
)
def test_a_large_tensor_inside_a_node(kind: CollectiveKind, wanted: float) -> None:
    group = ring(_TWO, (0, 1, 2, 3), (0, 1, 2, 3))
    assert seconds(kind, _SIZE, group) == pytest.approx(wanted)


def test_a_small_tensor_takes_the_tree() -> None:
    """NCCL, src/graph/tuning.cc: a chain inside each node, log2 steps between them."""
    wide = cluster([[_KIND] * 2] * 16, intra=Link(100e9, 1e-6), nic=Link(10e9, 1e-3))
    ranks = tuple(range(32))
    group = ring(wide, ranks, ranks)
    assert seconds("all_reduce", 8.0, group) == pytest.approx(2 * (1e-6 + 4 * 1e-3), rel=1e-6)
    assert seconds("all_gather", 8.0, group) == pytest.approx(16 * 1e-6 + 15 * 1e-3, rel=1e-6)


def test_across_nodes_a_ring_is_as_quick_as_its_slowest_link() -> None:
    """Its channels together use the whole NIC of both nodes."""
    group = ring(_TWO, _ALL, _ALL)
    assert (group.nodes, group.per_node, group.ranks) == (2, 4, 8)
    once = 6 * 1e-6 + 5e-6 + 7 / 8 * _SIZE / 10e9
    assert seconds("all_gather", _SIZE, group) == pytest.approx(once)
    assert seconds("all_reduce", _SIZE, group) == pytest.approx(2 * once)


def test_a_wide_network_leaves_the_links_inside_as_the_limit() -> None:
    wide = cluster([[_KIND] * 4] * 2, intra=_FAST, nic=Link(400e9, 5e-6))
    once = 6 * 1e-6 + 5e-6 + 7 / 8 * _SIZE / 100e9
    assert seconds("all_gather", _SIZE, ring(wide, _ALL, _ALL)) == pytest.approx(once)


def test_all_to_all_across_nodes() -> None:
    """Each rank holds 1/8 and sends half of it to the other node, over a quarter of the NIC."""
    group = ring(_TWO, _ALL, _ALL)
    between = 1 / 2 * _SIZE / 8 / (10e9 / 4 * EXCHANGE_SHARE)
    assert seconds("all_to_all", _SIZE, group) == pytest.approx(3e-6 + 5e-6 + between)


def test_a_large_collective_reaches_a_share_of_the_wire() -> None:
    link = replace(_FAST, efficiency=0.8)
    group = ring(cluster([[_KIND] * 4], intra=link), (0, 1, 2, 3), (0, 1, 2, 3))
    wanted = 3e-6 + 3 / 4 * _SIZE / 80e9
    assert seconds("all_gather", _SIZE, group) == pytest.approx(wanted)


def test_the_launch_of_the_slowest_kind_counts_once() -> None:
    slow = replace(_KIND, name="slow", collective_launch=1e-3)
    mixed = cluster([[_KIND, slow, _KIND]], intra=Link(1e15, 0.0))
    assert seconds("all_reduce", 8.0, ring(mixed, (0, 1, 2), (0, 1, 2))) == pytest.approx(1e-3)
    assert seconds("all_reduce", 8.0, ring(mixed, (0, 2), (0, 1, 2))) < 1e-6
    assert point_to_point(mixed, (0,), (1,), 8.0) == pytest.approx(1e-3)


def test_a_switch_that_adds_up() -> None:
    """NVLS: every device sends its tensor once and gets the sum once; 480 GB/s on H200."""
    switch = replace(_FAST, reduces=True)
    group = ring(cluster([[_KIND] * 8], intra=switch), _ALL, _ALL)
    assert seconds("all_reduce", _SIZE, group) == pytest.approx(
        2e-6 + _SIZE / (100e9 * SWITCH_SHARE)
    )
    pair = ring(cluster([[_KIND] * 8], intra=switch), (0, 1), _ALL)
    assert seconds("all_reduce", _SIZE, pair) == pytest.approx(2 * (1e-6 + _SIZE / 2 / 100e9))
    hopper = Cluster.parse("8xH200")
    time = seconds("all_reduce", 16 * 2.0**30, ring(hopper, _ALL, _ALL))
    assert 2 * 7 / 8 * 16 * 2.0**30 / time == pytest.approx(480e9, rel=0.05)


def test_a_network_that_adds_up() -> None:
    """Inside a ring's two passes at 100 GB/s, between nodes once each way at 10 GB/s."""
    network = cluster([[_KIND] * 4] * 2, intra=_FAST, nic=replace(_SLOW, reduces=True))
    time = seconds("all_reduce", _SIZE, ring(network, _ALL, _ALL))
    assert time == pytest.approx(2 * (3e-6 + 5e-6) + _SIZE / (10e9 * SWITCH_SHARE))


def test_a_network_whose_hosts_pass_on() -> None:
    """Three steps between nodes are longer, a message is not."""
    relayed = cluster([[_KIND] * 4] * 4, intra=_FAST, nic=Link(10e9, 5e-6, relay=1e-4))
    ranks = tuple(range(16))
    once = 12e-6 + 3 * (5e-6 + 1e-4) + 15 / 16 * _SIZE / 10e9
    assert seconds("all_gather", _SIZE, ring(relayed, ranks, ranks)) == pytest.approx(once)
    message = 5e-6 + _SIZE / 10e9
    assert point_to_point(relayed, (0,), (4,), _SIZE) == pytest.approx(message)


@pytest.mark.parametrize(
    ("fabric", "members", "share"),
    [
        ("mesh", (0, 1), 1 / 7), ("mesh", (0, 1, 2, 3), 3 / 7), ("mesh", _ALL, 1.0),
        ("cube", (0, 1), 1 / 3), ("cube", (0, 1, 2, 3), 2 / 3), ("cube", _ALL, 1.0),
    ],
)  # fmt: skip
def test_a_group_has_the_part_of_a_mesh_that_lies_inside_it(
    fabric: str, members: tuple[int, ...], share: float
) -> None:
    """MI300X: 47.7 GB/s between two of eight, 312.9 among all; V100: 42, 77 and 130 GB/s."""
    link = Link(100e9, 0.0, fabric="mesh" if fabric == "mesh" else "cube")
    joined = cluster([[_KIND] * 8], intra=link)
    ranks = len(members)
    wanted = (ranks - 1) / ranks * _SIZE / (100e9 * share)
    assert seconds("all_gather", _SIZE, ring(joined, members, members)) == pytest.approx(wanted)
    pair = 1 / 7 if fabric == "mesh" else 1 / 3
    assert point_to_point(joined, (0,), (1,), _SIZE) == pytest.approx(_SIZE / (100e9 * pair))


def test_groups_side_by_side_share_the_nic() -> None:
    """Device 0 reduces with device 4: alone with the whole NIC, else with what is left."""
    alone = ring(_TWO, (0, 4), (0, 4))
    crowded = ring(_TWO, (0, 4), _ALL)
    assert alone.inter is not None
    assert crowded.inter is not None
    assert alone.inter.bandwidth == 10e9
    assert crowded.inter.bandwidth == 2.5e9
    assert seconds("all_gather", _SIZE, crowded) == pytest.approx(5e-6 + 0.5 * _SIZE / 2.5e9)


def test_a_flow_between_two_devices_has_one_nic() -> None:
    """Of eight NICs one device uses one, four use four, and all of them share all."""
    nics = cluster([[_KIND] * 8] * 2, intra=_FAST, nic=Link(80e9, 0.0, nics=8))
    everyone = tuple(range(16))
    assert point_to_point(nics, (0,), (8,), _SIZE) == pytest.approx(_SIZE / 10e9)
    assert point_to_point(nics, _ALL, everyone[8:], _SIZE) == pytest.approx(_SIZE / 80e9)
    four = (0, 1, 2, 3, 8, 9, 10, 11)
    time = seconds("all_gather", _SIZE, ring(nics, four, four))
    assert time == pytest.approx(6e-6 + 7 / 8 * _SIZE / 40e9)
    assert seconds("all_gather", _SIZE, ring(nics, four, everyone)) == pytest.approx(time)
    assert seconds("all_gather", _SIZE, ring(nics, (0, 8), (0, 8))) == pytest.approx(
        _SIZE / 2 / 10e9
    )


def test_groups_across_host_bridges_share_the_way() -> None:
    """Devices 0-3 are behind one bridge, 4-7 behind the other."""
    host = cluster([[_KIND] * 8], intra=Link(10e9, 0.0))
    host = replace(host, nodes=(replace(host.nodes[0], bridge=4),))
    half = _SIZE / 2 / 10e9
    assert seconds("all_gather", _SIZE, ring(host, (0, 1), _ALL)) == pytest.approx(half)
    assert seconds("all_gather", _SIZE, ring(host, (0, 4), (0, 4))) == pytest.approx(half)
    assert seconds("all_gather", _SIZE, ring(host, (0, 4), _ALL)) == pytest.approx(4 * half)
    whole = 7 / 8 * _SIZE / 10e9
    assert seconds("all_gather", _SIZE, ring(host, _ALL, _ALL)) == pytest.approx(whole)
    assert point_to_point(host, (0, 1), (2, 3), _SIZE) == pytest.approx(_SIZE / 2 / 10e9)
    assert point_to_point(host, (0, 1), (4, 5), _SIZE) == pytest.approx(_SIZE / 10e9)


def test_a_pair_with_a_link_of_its_own() -> None:
    """An NVLink bridge serves its pair; a group of more also goes over the slower link."""
    base = cluster([[_KIND] * 4], intra=Link(10e9, 0.0))
    bridged = replace(base, overrides=((0, 1, Link(100e9, 0.0)),))
    assert seconds("all_gather", _SIZE, ring(bridged, (0, 1), (0, 1, 2, 3))) == pytest.approx(
        _SIZE / 2 / 100e9
    )
    assert seconds("all_gather", _SIZE, ring(bridged, (0, 1, 2), (0, 1, 2))) == pytest.approx(
        _SIZE * 2 / 3 / 10e9
    )


def test_one_rank_or_nothing_to_send_is_free() -> None:
    assert seconds("all_reduce", _SIZE, ring(_TWO, (3,), _ALL)) == 0.0
    assert seconds("all_reduce", 0.0, ring(_TWO, _ALL, _ALL)) == 0.0


def test_measured_curves_take_precedence() -> None:
    curves = (
        CollectiveCurve("all_reduce", 4, 1e-3, 2e-9),
        CollectiveCurve("p2p", 2, 1e-4, 1e-9),
    )
    measured = cluster([[_KIND] * 4], curves=curves)
    group = ring(measured, (0, 1, 2, 3), (0, 1, 2, 3))
    assert seconds("all_reduce", 1e6, group) == pytest.approx(1e-3 + 2e-3)
    unmeasured = ring(cluster([[_KIND] * 4]), (0, 1, 2, 3), (0, 1, 2, 3))
    assert seconds("all_gather", 1e6, group) == seconds("all_gather", 1e6, unmeasured)
    pair = ring(measured, (0, 1), (0, 1, 2, 3))
    assert pair.curves == (curves[1],), "a curve is for its number of ranks"
    assert point_to_point(measured, (0,), (1,), 1e6) == pytest.approx(1e-4 + 1e-3)
    assert point_to_point(measured, (0, 1), (2, 3), 1e6) == pytest.approx(1e-4 + 0.5e-3)


@given(kinds, sizes, sizes, st.integers(1, 3), st.integers(1, 5))
def test_more_bytes_never_take_less(
    kind: CollectiveKind, one: float, other: float, nodes: int, each: int
) -> None:
    devices = cluster([[_KIND] * each] * nodes)
    ranks = tuple(range(nodes * each))
    group = ring(devices, ranks, ranks)
    small, large = sorted((one, other))
    assert 0.0 <= seconds(kind, small, group) <= seconds(kind, large, group)


@given(kinds, sizes, st.data())
def test_the_order_of_the_nodes_does_not_matter(
    kind: CollectiveKind, size: float, data: st.DataObject
) -> None:
    order = data.draw(st.permutations([(0, 1, 2, 3), (4, 5, 6, 7)]))
    ranks = tuple(rank for node in order for rank in node)
    assert seconds(kind, size, ring(_TWO, ranks, ranks)) == seconds(
        kind, size, ring(_TWO, _ALL, _ALL)
    )


def test_all_reduce_is_reduce_scatter_and_all_gather() -> None:
    group = ring(_TWO, _ALL, _ALL)
    parts = seconds("reduce_scatter", _SIZE, group) + seconds("all_gather", _SIZE, group)
    assert seconds("all_reduce", _SIZE, group) == pytest.approx(parts)


@pytest.mark.parametrize(
    ("source", "target", "wanted"),
    [
        ((0,), (1,), 1e-6 + _SIZE / 100e9),
        ((0, 1), (2, 3), 1e-6 + _SIZE / 2 / 100e9),
        ((0,), (4,), 5e-6 + _SIZE / 10e9),
        # Two streams share the NIC of node 0, and of node 1.
        ((0, 1), (4, 5), 5e-6 + _SIZE / 2 * 2 / 10e9),
        ((0, 1, 2, 3), (4,), 5e-6 + _SIZE / 10e9),
        ((0, 1), (0, 1), 0.0),
    ],
)
def test_point_to_point(source: tuple[int, ...], target: tuple[int, ...], wanted: float) -> None:
    assert point_to_point(_TWO, source, target, _SIZE) == pytest.approx(wanted)
    assert point_to_point(_TWO, target, source, _SIZE) == pytest.approx(wanted)


def test_streams_that_enter_one_node_share_its_nic() -> None:
    hosts = cluster([[_KIND], [_KIND], [_KIND, _KIND]], intra=_FAST, nic=_SLOW)
    wanted = 5e-6 + _SIZE / 2 * 2 / 10e9
    assert point_to_point(hosts, (0, 1), (2, 3), _SIZE) == pytest.approx(wanted)
    assert point_to_point(hosts, (2, 3), (0, 1), _SIZE) == pytest.approx(wanted)


def test_equal_groups_have_equal_rings() -> None:
    assert ring(_TWO, (0, 1), _ALL) == ring(_TWO, (6, 7), _ALL)
    assert ring(_TWO, (0,), _ALL) == Ring(1)


links = st.builds(
    Link,
    st.floats(1e9, 1e12),
    st.floats(0.0, 1e-4),
    efficiency=st.floats(0.1, 1.0),
    nics=st.integers(1, 8),
    relay=st.floats(0.0, 1e-3),
)
shapes = st.tuples(st.integers(1, 5), st.integers(1, 5))


def _whole(nodes: int, each: int, intra: Link, nic: Link) -> Ring:
    ranks = tuple(range(nodes * each))
    return ring(cluster([[_KIND] * each] * nodes, intra=intra, nic=nic), ranks, ranks)


@given(kinds.filter(lambda kind: kind != "all_to_all"), sizes, links, links, shapes)
def test_more_nodes_never_take_less(
    kind: CollectiveKind, size: float, intra: Link, nic: Link, shape: tuple[int, int]
) -> None:
    """An all-to-all may: where the network is quicker than the links inside nodes."""
    nodes, each = shape
    times = [seconds(kind, size, _whole(n, each, intra, nic)) for n in (nodes, nodes + 1)]
    assert times[0] <= times[1] * (1 + 1e-9)


@given(kinds, sizes, links, st.integers(1, 12))
def test_more_ranks_of_a_node_never_take_less(
    kind: CollectiveKind, size: float, link: Link, ranks: int
) -> None:
    """The tensor whole, but of an all-to-all what each rank holds."""
    times = [
        seconds(kind, size * (n if kind == "all_to_all" else 1), _whole(1, n, link, link))
        for n in (ranks, ranks + 1)
    ]
    assert times[0] <= times[1] * (1 + 1e-9)


@given(sizes, links, links, shapes)
def test_an_all_reduce_is_no_quicker_than_a_reduce_scatter_inside_a_node(
    size: float, intra: Link, nic: Link, shape: tuple[int, int]
) -> None:
    group = _whole(1, shape[0] * shape[1], intra, nic)
    assert seconds("reduce_scatter", size, group) <= seconds("all_reduce", size, group)


@given(links, links, shapes)
def test_an_all_reduce_of_a_large_tensor_is_no_quicker_than_a_reduce_scatter(
    intra: Link, nic: Link, shape: tuple[int, int]
) -> None:
    group = _whole(*shape, intra, nic)
    assert seconds("reduce_scatter", 1e15, group) <= seconds("all_reduce", 1e15, group)


@given(st.sampled_from(["all_gather", "reduce_scatter"]), sizes, links, shapes)
def test_links_inside_nodes_are_never_slower_than_the_network_all_the_way(
    kind: CollectiveKind, size: float, nic: Link, shape: tuple[int, int]
) -> None:
    """A ring over nodes takes no longer than one whose every step is over a NIC."""
    nodes, each = shape
    nic = replace(nic, nics=1)
    inside = replace(nic, latency=nic.latency / 2)
    flat = _whole(nodes * each, 1, nic, nic)
    time = seconds(kind, size, _whole(nodes, each, inside, nic))
    assert time <= seconds(kind, size, flat) * (1 + 1e-9)


@given(sizes, links, links, shapes, st.booleans(), st.booleans())
def test_adding_up_in_a_switch_is_never_slower(
    size: float, intra: Link, nic: Link, shape: tuple[int, int], inside: bool, between: bool
) -> None:
    plain = _whole(*shape, intra, nic)
    switched = _whole(*shape, replace(intra, reduces=inside), replace(nic, reduces=between))
    assert seconds("all_reduce", size, switched) <= seconds("all_reduce", size, plain)


@given(kinds, st.integers(1, 8))
def test_groups_that_share_a_nic_take_their_number_of_times(
    kind: CollectiveKind, groups: int
) -> None:
    """Rank g of each of four nodes forms group g; without latency only bytes count."""
    hosts = cluster([[_KIND] * 8] * 4, nic=Link(10e9, 0.0))
    members = (0, 8, 16, 24)
    busy = tuple(node * 8 + group for node in range(4) for group in range(groups))
    alone, together = (seconds(kind, _SIZE, ring(hosts, members, b)) for b in (members, busy))
    assert together == pytest.approx(groups * alone)
