from __future__ import annotations

import networkx as nx
import numpy as np
import pytest

from rlplace.cost.given.event_loop import event_arrays
from rlplace.planners.given.exhaustive import exhaustive
from rlplace.planners.given.heft import heft
from rlplace.planners.given.merge_milp import merge_milp
from rlplace.planners.given.merging import merged
from rlplace.planners.given.schedule_milp import greedy_makespan, least_makespan, tasks_of
from rlplace.planners.types import Limits
from tests.planners.given.cases import random_doppler, random_giph

_RNG = np.random.default_rng(0)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("count", [1, 4, 9])
def test_tasks_are_acyclic_and_have_all_work_and_a_device(seed: int, count: int) -> None:
    for make in (random_giph, random_doppler):
        arrays = event_arrays(make(np.random.default_rng(seed), 20, 4))
        tasks, task_of = merged(arrays, count)
        assert len(tasks.times) == len(set(task_of.tolist()))
        assert np.all(tasks.sources < tasks.targets), "numbered in topological order"
        assert tasks.legal.any(axis=1).all()
        for device in range(4):
            together = np.zeros(len(tasks.times))
            np.add.at(together, task_of, arrays.times[:, device])
            assert together == pytest.approx(tasks.times[:, device])
        own = tasks_of(arrays)
        crossing = {
            (int(task_of[a]), int(task_of[b]))
            for a, b in zip(own.sources, own.targets, strict=True)
            if task_of[a] != task_of[b]
        }
        assert crossing == set(zip(tasks.sources.tolist(), tasks.targets.tolist(), strict=True))
        assert nx.is_directed_acyclic_graph(nx.DiGraph(list(crossing)))


def test_as_many_tasks_as_ops_is_the_graph_itself() -> None:
    arrays = event_arrays(random_giph(np.random.default_rng(1), 8, 3))
    tasks, _ = merged(arrays, 8)
    cutoff = greedy_makespan(tasks)
    found = least_makespan(tasks, cutoff)
    assert found.makespan == pytest.approx(least_makespan(tasks_of(arrays), cutoff).makespan)
    assert found.makespan <= cutoff * (1 + 1e-6)


def test_the_schedule_of_merged_ops_is_no_better_than_that_of_ops() -> None:
    """Merged ops may only do what ops may: same device, one after the other."""
    for seed in range(4):
        arrays = event_arrays(random_giph(np.random.default_rng(seed), 9, 3))
        tasks, _ = merged(arrays, 4)
        coarse = least_makespan(tasks, greedy_makespan(tasks)).makespan
        whole = tasks_of(arrays)
        assert coarse >= least_makespan(whole, greedy_makespan(whole)).makespan * (1 - 1e-6)


@pytest.mark.parametrize("seed", range(3))
def test_small_problems_are_near_the_optimum(seed: int) -> None:
    instance = random_giph(np.random.default_rng(seed), 8, 3)
    best = exhaustive(instance, Limits(), _RNG).value
    found = merge_milp(instance, Limits(), _RNG).value
    assert best <= found <= min(1.1 * best, heft(instance, Limits(), _RNG).value)
