"""Tests of Poplar's shares of one stage."""

from __future__ import annotations

import numpy as np
import pytest

from rlplace.plan.testing import chain, cluster, round_kind, transformer
from rlplace.plan.types import Instance, Plan
from rlplace.planners.poplar import poplar
from rlplace.planners.replicas import data_parallel, zero3
from rlplace.planners.types import Budget, Planner, PlannerResult

_FAST, _SLOW = round_kind("fast"), round_kind("slow", 0.25)


def search(instance: Instance, planner: Planner = poplar) -> PlannerResult:
    return planner(instance, Budget(), np.random.default_rng(0))


def plan_of(result: PlannerResult) -> Plan:
    assert result.plan is not None
    return result.plan


def seconds(result: PlannerResult) -> float:
    assert result.estimate is not None
    return result.estimate.step_time


def test_a_device_four_times_as_fast_has_four_times_the_samples() -> None:
    instance = Instance(chain([1e10] * 4), cluster([[_FAST, _SLOW]]), 10)
    result = search(instance)
    plan = plan_of(result)
    assert plan.stages[0].shares == (8, 2)
    assert plan.micro_batches == 1
    # 8 samples of 4 groups, 3 x 1e10 FLOPs each, at one TFLOP/s.
    assert seconds(result) == pytest.approx(0.96, rel=0.01)
    assert seconds(search(instance, data_parallel)) == pytest.approx(4 * 5 * 0.12, rel=0.01)


def test_equal_devices_have_equal_shares() -> None:
    instance = Instance(transformer(3), cluster([[_FAST] * 4]), 16)
    result = search(instance)
    assert plan_of(result).stages[0].shares == ()
    replicated = min(seconds(search(instance, planner)) for planner in (data_parallel, zero3))
    assert seconds(result) <= replicated * (1 + 1e-9)


def test_all_devices_take_part_where_their_number_does_not_divide_the_batch() -> None:
    instance = Instance(chain([1e10] * 4), cluster([[_FAST] * 3]), 8)
    plan = plan_of(search(instance))
    assert sorted(plan.stages[0].shares) == [2, 3, 3]


def test_memory_limits_a_share() -> None:
    # Two tensors of 1e8 bf16 elements a sample and group: 1.6 GB a sample for the chain.
    small = round_kind("small", memory=6e9)
    graph = chain([1e10] * 4, floats=1e8)
    instance = Instance(
        graph, cluster([[round_kind("big", 0.5), small]]), 12, recompute_modes=("none",)
    )
    result = search(instance)
    plan = plan_of(result)
    assert result.estimate is not None
    assert result.estimate.feasible
    shares = plan.stages[0].samples(plan.micro_batch)
    assert shares[1] * 1.6e9 < 6e9


def test_a_device_that_only_hurts_stays_idle() -> None:
    crawl = round_kind("crawl", 0.01)
    instance = Instance(chain([1e10] * 4), cluster([[_FAST, crawl]]), 8)
    assert search(instance).idle == (1,)
