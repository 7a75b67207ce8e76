from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from rlplace.cost.given.event_loop import event_arrays
from rlplace.planners.given.min_cut import CutGraph, cut_graph, in_order, min_cut, refined
from rlplace.planners.types import Limits
from tests.planners.given.cases import random_doppler, random_giph


def two_cliques() -> CutGraph:
    """Ops 0, 2, 4 and 1, 3, 5 hang together; one thin edge between; equal work on two devices."""
    weights = np.array([[5.0 * (a % 2 == b % 2 and a != b) for b in range(6)] for a in range(6)])
    weights[0, 1] = weights[1, 0] = 1.0
    return CutGraph(np.ones((6, 2)), weights, 3.0)


def test_the_worked_case() -> None:
    graph = two_cliques()
    first = in_order(graph)
    assert first.tolist() == [0, 0, 0, 1, 1, 1]
    assert graph.cut(first) == 20.0
    # With no room at all nothing can move; with one op of room the cliques come apart.
    assert graph.cut(refined(graph, first, 3.0)) == 20.0
    found = refined(graph, first, 4.0)
    assert graph.cut(found) == 1.0
    assert graph.loads(found).tolist() == [3.0, 3.0]


def test_even_is_the_load_of_work_shared_by_speed() -> None:
    arrays = event_arrays(random_doppler(np.random.default_rng(0), 10, 4))
    assert cut_graph(arrays).even == pytest.approx(arrays.times[:, 0].sum() / 4)
    unlike = arrays._replace(times=np.array([[2.0, 6.0], [np.inf, 3.0]]), first=np.zeros(3, int))
    # 1 / (1/2 + 1/6) of the first, and all of the second on the one device that takes it.
    unlike = unlike._replace(readers=np.zeros((1, 0), int), sizes=np.zeros((1, 0)))
    assert cut_graph(unlike).even == pytest.approx(1.5 + 3.0)


@pytest.mark.parametrize("seed", range(4))
def test_refinement_is_balanced_and_near_the_least_cut(seed: int) -> None:
    graph = cut_graph(event_arrays(random_giph(np.random.default_rng(seed), 8, 2)))
    most = 1.5 * graph.even
    legal = [np.flatnonzero(np.isfinite(row)).tolist() for row in graph.times]
    every = [np.array(one) for one in product(*legal)]
    balanced = [graph.cut(one) for one in every if graph.loads(one).max() <= most]
    found = refined(graph, in_order(graph), most)
    assert np.isfinite(graph.times[np.arange(8), found]).all()
    if balanced and graph.loads(in_order(graph)).max() <= most:
        assert graph.loads(found).max() <= most * (1 + 1e-9)
        assert min(balanced) <= graph.cut(found) + 1e-9
        assert graph.cut(found) <= graph.cut(in_order(graph))


def test_an_overfull_device_is_emptied_first() -> None:
    graph = two_cliques()
    found = refined(graph, np.zeros(6, np.int64), 4.0)
    assert graph.loads(found).max() <= 4.0


def test_more_starts_are_no_worse() -> None:
    instance = random_giph(np.random.default_rng(5), 20, 4)
    values = [
        min_cut(instance, Limits(evaluations=count), np.random.default_rng(0)).value
        for count in (1, 3, 15)
    ]
    assert values == sorted(values, reverse=True)
