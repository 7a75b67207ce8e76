"""What a stage costs: sums of its groups, and the reduction that stays exposed."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlplace.cost.types import GroupCost
from rlplace.graph.types import Affine, Edge, Group, OpGraph, Structure, Work
from rlplace.plan.schedules import lane_orders
from rlplace.plan.testing import cluster, round_kind
from rlplace.plan.types import GroupChoice, Instance, Recompute
from rlplace.simulate.orders import orders
from rlplace.simulate.stages import (
    Bucket,
    boundaries,
    boundary_bytes,
    buckets,
    exposed_reduce,
    fullest,
    stopped,
)
from rlplace.simulate.timeline import LAST, REDUCED, Durations, simulate


def _group(backward: float, reduce: float, hidden: float = 1.0) -> GroupCost:
    return GroupCost(0.0, backward, reduce, hidden, 0.0, 0.0, 0.0, 0.0)


def test_a_reduction_hides_behind_the_backward_of_the_groups_before() -> None:
    # Backward runs from the last group: its reduction starts at 2 and has 3 s until the end.
    assert exposed_reduce([_group(3, 0), _group(2, 2)]) == 0.0
    assert exposed_reduce([_group(3, 0), _group(2, 5)]) == pytest.approx(2.0)
    # The first group's reduction comes after everything, behind what still queues.
    assert exposed_reduce([_group(3, 1), _group(2, 2)]) == pytest.approx(1.0)
    assert exposed_reduce([_group(3, 1), _group(2, 5)]) == pytest.approx(3.0)


def test_only_the_share_that_may_hide_hides() -> None:
    assert exposed_reduce([_group(3, 1, 0.0), _group(2, 5, 0.0)]) == 6.0
    assert exposed_reduce([_group(9, 0, 0.75), _group(2, 4, 0.75)]) == pytest.approx(1.0)


def test_a_bucket_is_ready_when_its_group_is_done() -> None:
    groups = [_group(3, 1), _group(2, 0), _group(1, 4, 0.5)]
    assert buckets(groups) == (Bucket(2.0, 1 / 6, 1.0), Bucket(1.0, 1.0, 1.0))
    apart = [replace(group, weight_backward=w) for group, w in zip(groups, (1, 0, 3), strict=True)]
    assert [bucket.ready_apart for bucket in buckets(apart)] == [0.75, 1.0]


def test_only_the_last_of_those_that_are_redone_as_one_stops_early() -> None:
    modes: tuple[Recompute, ...] = ("none", "full", "joined", "full", "full")
    groups = [replace(_group(5, 0), skipped=2.0 if mode != "none" else 0.0) for mode in modes]
    found = stopped(groups, [GroupChoice(recompute=mode) for mode in modes])
    assert [group.backward for group in found] == [5.0, 5.0, 3.0, 3.0, 3.0]


def test_groups_that_are_redone_as_one_are_saved_again_together() -> None:
    """Before the last of them is in backward; it frees what it has used."""
    none, full, joined = (
        GroupChoice(),
        GroupChoice(recompute="full"),
        GroupChoice(recompute="joined"),
    )
    groups = [
        replace(_group(1, 0), transient=transient, redone=redone, logits=2.0)
        for transient, redone in ((12.0, 10.0), (24.0, 20.0), (33.0, 30.0), (1.0, 0.0))
    ]
    assert fullest(groups, [full, joined, joined, none]) == (10 + 20 + 33, 6.0)
    assert fullest(groups, [full, joined, full, none]) == (10 + 24, 4.0)
    assert fullest(groups, [full, full, full, none]) == (33, 2.0)
    assert fullest(groups[3:], [none]) == (1.0, 0.0)


costs = st.builds(_group, st.floats(0, 10), st.floats(0, 10), st.floats(0, 1))


@given(st.lists(costs, min_size=1, max_size=8))
def test_the_events_say_the_same(groups: list[GroupCost]) -> None:
    """What the simulator makes of the buckets of a stage alone."""
    own = buckets(groups)
    backward = sum(group.backward for group in groups)
    durations = Durations(
        seconds=np.array([1.0, backward, backward, 0.0]),
        transfer=np.zeros(0),
        sends=np.zeros(0, np.int64),
        optimizer=np.zeros(1),
        bucket_first=np.array([0, len(own)]),
        bucket_seconds=np.array([bucket.seconds for bucket in own]),
        bucket_ready=np.array([bucket.ready for bucket in own]),
        late=np.array([sum((1.0 - group.hidden) * group.reduce for group in groups)]),
        joint_one=np.zeros(0, np.int64),
        joint_other=np.zeros(0, np.int64),
        joint_seconds=np.zeros(0),
        cores=np.zeros(1, np.int64),
    )
    tails = simulate(orders(lane_orders("1f1b", (0,), 2)), durations).tails
    found = tails[REDUCED, 0] - tails[LAST, 0]
    assert found == pytest.approx(exposed_reduce(groups), rel=1e-9, abs=1e-9)


@given(st.lists(costs, min_size=1, max_size=8))
def test_bounds_of_the_exposed_reduction(groups: list[GroupCost]) -> None:
    exposed = exposed_reduce(groups)
    total = sum(group.reduce for group in groups)
    assert -1e-9 <= exposed <= total + 1e-9
    assert exposed >= groups[0].reduce - 1e-9, "nothing is left to hide the first group's behind"
    assert exposed >= total - sum(group.backward for group in groups[:-1]) - 1e-9


def test_a_tensor_read_twice_by_a_group_is_kept_once() -> None:
    edges = (
        Edge(0, 1, "a", Affine(0.0, 10.0)),
        Edge(0, 1, "a", Affine(0.0, 10.0)),
        Edge(0, 1, "mask", other_bytes=Affine(8.0, 1.0)),
        Edge(0, 2, "a", Affine(0.0, 10.0)),
        Edge(1, 2, "b", Affine(5.0, 20.0)),
    )
    groups = tuple(Group(index, str(index), 0) for index in range(3))
    graph = OpGraph("dag", groups, edges, (Structure("x", Work()),))
    reads = boundaries(graph)
    assert reads == ((0, 0, 0, 0), (0, 10, 8, 1), (5, 30, 0, 0))
    instance = Instance(graph, cluster([[round_kind()]]), 4)
    assert boundary_bytes(instance, reads[1], 3) == 3 * 10 * 2 + 8 + 3
    assert boundary_bytes(instance, reads[2], 3) == (5 + 3 * 30) * 2
