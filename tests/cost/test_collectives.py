"""Collectives against formulas worked out by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlplace.cluster.types import CollectiveCurve, CollectiveKind, Link
from rlplace.cost.collectives import Ring, point_to_point, ring, seconds
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
        ("all_to_all", 3 * 1e-6 + 3 / 4 * _SIZE / 4 / 100e9),
    ],
)
def test_a_large_tensor_inside_a_node(kind: CollectiveKind, wanted: float) -> None:
    group = ring(_TWO, (0, 1, 2, 3), (0, 1, 2, 3))
    assert seconds(kind, _SIZE, group) == pytest.approx(wanted)


def test_a_small_tensor_takes_the_tree() -> None:
    wide = cluster([[_KIND] * 16], intra=Link(100e9, 1e-3))
    group = ring(wide, tuple(range(16)), tuple(range(16)))
    assert seconds("all_reduce", 8.0, group) == pytest.approx(2 * 4 * 1e-3)


def test_across_nodes_it_is_hierarchical() -> None:
    group = ring(_TWO, _ALL, _ALL)
    assert (group.nodes, group.per_node, group.ranks) == (2, 4, 8)
    inside = 3 * 1e-6 + 3 / 4 * _SIZE / 100e9
    # Four members of a node send a quarter each, over a quarter of the NIC each.
    between = 5e-6 + 1 / 2 * (_SIZE / 4) / (10e9 / 4)
    assert seconds("all_reduce", _SIZE, group) == pytest.approx(2 * (inside + between))
    assert seconds("all_gather", _SIZE, group) == pytest.approx(inside + between)


def test_all_to_all_across_nodes() -> None:
    """Each rank holds 1/8: 3/4 of it changes the place inside, half of it the node."""
    group = ring(_TWO, _ALL, _ALL)
    inside = 3 * 1e-6 + 3 / 4 * _SIZE / 8 / 100e9
    between = 5e-6 + 1 / 2 * _SIZE / 8 / (10e9 / 4)
    assert seconds("all_to_all", _SIZE, group) == pytest.approx(inside + between)


def test_groups_side_by_side_share_the_nic() -> None:
    """Device 0 reduces with device 4: alone with the whole NIC, else with what is left."""
    alone = ring(_TWO, (0, 4), (0, 4))
    crowded = ring(_TWO, (0, 4), _ALL)
    assert alone.inter is not None
    assert crowded.inter is not None
    assert alone.inter.bandwidth == 10e9
    assert crowded.inter.bandwidth == 2.5e9
    assert seconds("all_gather", _SIZE, crowded) == pytest.approx(5e-6 + 0.5 * _SIZE / 2.5e9)


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
