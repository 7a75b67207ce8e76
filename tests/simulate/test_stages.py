"""What a stage costs: sums of its groups, and the reduction that stays exposed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlplace.cost.types import GroupCost
from rlplace.graph.types import Affine, Edge, Group, OpGraph, Structure, Work
from rlplace.plan.testing import cluster, round_kind
from rlplace.plan.types import Instance
from rlplace.simulate.stages import boundaries, boundary_bytes, exposed_reduce


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


costs = st.builds(_group, st.floats(0, 10), st.floats(0, 10), st.floats(0, 1))


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
