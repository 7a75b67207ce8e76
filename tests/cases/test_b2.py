"""GPT-3 13B on 16 cards as 16 stages (Megatron-LM#1303): 40 layers are 8 stages of 3 and 8 of 2.

And what else 16 cards can do, beside it with its time: PP8 x DP2 and TP2 x PP8.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import rlplace
from rlplace.cluster.types import Cluster
from rlplace.plan.types import Plan
from rlplace.plan.uniform import layer_keys
from rlplace.planners.dynamic import dynamic
from rlplace.planners.grid import grid
from rlplace.planners.types import Budget, Planner

CARDS, LAYERS = 16, 40


@pytest.fixture(scope="module")
def instance() -> rlplace.Instance:
    """Two nodes; of 127 samples no replicas can be made."""
    graph = rlplace.library.build("gpt3-13b", degrees=(2,))
    return rlplace.Instance(graph, Cluster.parse("2x8xA100-80"), 127)


def _counts(instance: rlplace.Instance, plan: Plan) -> list[float]:
    """Layers of each stage; a layer's groups count as equal parts of it."""
    keys = layer_keys(instance.graph)
    parts = sum(key == keys[2] for key in keys)
    return [sum(map(bool, keys[stage.start : stage.stop])) / parts for stage in plan.stages]


def test_sixteen_stages_by_layers(instance: rlplace.Instance) -> None:
    plan = rlplace.uniform_plan(instance, pp=CARDS, micro_batch=1, balance="layers")
    assert sorted(_counts(instance, plan)) == [2] * 8 + [3] * 8


@pytest.mark.parametrize("planner", [grid, dynamic], ids=["grid", "dynamic"])
def test_a_planner_asked_for_sixteen_stages(instance: rlplace.Instance, planner: Planner) -> None:
    """Without tp and replicas there is no other way to use all cards."""
    alone = replace(instance, tp_degrees=(1,))
    found = planner(alone, Budget(evaluations=60), np.random.default_rng(0))
    assert found.plan is not None
    assert found.estimate is not None
    counts = _counts(alone, found.plan)
    assert sum(counts) == LAYERS
    assert len(counts) == CARDS
    assert max(counts) <= 3
    by_layers = rlplace.uniform_plan(alone, pp=CARDS, micro_batch=1, balance="layers")
    assert found.estimate.step_time <= rlplace.estimate(alone, by_layers).step_time


def test_others_beside_it_with_their_times(instance: rlplace.Instance) -> None:
    even = replace(instance, global_batch=128)
    asked: dict[str, dict[str, Any]] = {
        "PP16": {"pp": 16},
        "PP8 x DP2": {"pp": 8, "dp_replicate": 2},
        "TP2 x PP8": {"pp": 8, "tp": 2},
    }
    plans = {
        name: rlplace.uniform_plan(even, micro_batch=1, balance="layers", **degrees)
        for name, degrees in asked.items()
    }
    times = {name: rlplace.estimate(even, plan) for name, plan in plans.items()}
    print({name: f"{one.step_time:.2f} s" for name, one in times.items()})
    assert [sorted(set(_counts(even, plan))) for plan in plans.values()] == [[2, 3], [5], [5]]
    placed = rlplace.place(even, time_limit=0.5)
    fits = [one.step_time for one in times.values() if one.feasible]
    assert fits
    assert placed.estimate.step_time <= min(fits)
