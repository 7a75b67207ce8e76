from __future__ import annotations

import numpy as np
import pytest

from rlplace.cluster.types import Cluster
from rlplace.envs.families import transformer
from rlplace.envs.instances import InstanceGenerator
from rlplace.envs.reward import MeasuredReward, PredictedReward, heuristic_plan
from rlplace.errors import InputError
from rlplace.plan.types import Instance, Plan
from rlplace.plan.uniform import uniform_plan
from rlplace.simulate.estimate import estimate

_SMALL = InstanceGenerator(max_devices=4, max_groups=16)


def _instance(params: float = 3e8) -> Instance:
    graph = transformer(np.random.default_rng(0), params)
    return Instance(graph, Cluster.parse("4xA100-40"), 32)


def _lean(instance: Instance) -> Plan:
    return uniform_plan(instance, pp=4, micro_batches=32, recompute="full")


def test_the_baseline_itself_is_worth_nothing_and_a_plan_its_log_ratio() -> None:
    reward, instance = PredictedReward(), _instance()
    assert reward(instance, heuristic_plan(instance)).reward == pytest.approx(0.0)
    slow = uniform_plan(instance, dp_replicate=1, micro_batches=32)
    outcome = reward(instance, slow)
    ratio = outcome.baseline / estimate(instance, slow).step_time
    assert outcome.reward == pytest.approx(np.log(ratio))
    assert outcome.reward < 0.0


def test_an_overflow_costs_in_proportion_and_without_a_cliff() -> None:
    costs = []
    for params in (1.4e9, 2.8e9, 5.6e9):
        instance = _instance(params)
        plan = uniform_plan(instance, dp_replicate=1, micro_batches=32, recompute="full")
        lean = PredictedReward(_lean)
        over = max(0.0, max(estimate(instance, plan).peak_memory) / instance.memory_limit(0) - 1.0)
        base = lean(instance, plan)
        costs.append((over, -base.reward + np.log(base.baseline / base.step_time)))
    for over, cost in costs:
        assert cost == pytest.approx(4.0 * over, abs=0.05)
    assert costs[-1][0] > costs[0][0]


def test_a_measured_reward_needs_a_model_of_the_library() -> None:
    instance = _SMALL(np.random.default_rng(0))
    with pytest.raises(InputError, match="library"):
        MeasuredReward()(instance, heuristic_plan(instance))
