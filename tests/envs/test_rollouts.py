from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from rlplace.envs.builders.rollouts import greedy_state, imitate_plan
from rlplace.envs.builders.stagewise import StagewiseBuilder
from rlplace.envs.instances import InstanceGenerator
from rlplace.plan.types import Instance
from rlplace.plan.uniform import uniform_plan
from rlplace.planners.dynamic import dynamic
from rlplace.planners.types import Budget
from rlplace.simulate.estimate import Estimator

_GENERATOR = InstanceGenerator(max_devices=8, max_groups=30)
_BUILDER = StagewiseBuilder(refined=1)


def _instance(seed: int) -> Instance:
    return _GENERATOR(np.random.default_rng([6, seed]))


def _follow(instance: Instance, path: tuple[int, ...]) -> object:
    state = _BUILDER.start(instance)
    for index in path:
        state = _BUILDER.apply(state, index)
    return _BUILDER.plan(state)


def test_the_builders_own_plans_are_imitated_exactly() -> None:
    for seed in range(6):
        instance = _instance(seed)
        plan = _BUILDER.plan(greedy_state(_BUILDER, instance))
        found = imitate_plan(_BUILDER, instance, plan)
        assert found is not None
        assert found.lost == pytest.approx(0.0, abs=0.02)


def test_searched_plans_lose_little_and_the_path_leads_to_the_projection() -> None:
    lost = []
    for seed in range(6):
        instance = _instance(seed)
        result = dynamic(instance, Budget(evaluations=12), np.random.default_rng(0))
        if result.plan is None:
            continue
        found = imitate_plan(_BUILDER, instance, result.plan)
        if found is not None:
            assert _follow(instance, found.path) == found.plan
            estimator = Estimator(instance)
            times = [estimator.estimate(plan).step_time for plan in (found.plan, result.plan)]
            assert found.lost == pytest.approx(np.log(times[0] / times[1]), abs=1e-6)
            lost.append(found.lost)
    assert len(lost) >= 3
    assert np.mean(lost) < 0.1


def test_a_plan_outside_the_decisions_is_not_imitated() -> None:
    instance = replace(_instance(0), global_batch=5040)  # more divisors than counts are listed
    counts = _BUILDER.start(instance).desk.counts
    missing = next(n for n in range(1, 5041) if 5040 % n == 0 and n not in counts)
    plan = uniform_plan(instance, devices=(0,), micro_batches=missing)
    assert imitate_plan(_BUILDER, instance, plan) is None
