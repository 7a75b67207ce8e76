"""The overlap-aware program against all plans there are, and against the other program."""

from __future__ import annotations

import numpy as np
import pytest

from rlplace.bench.suites import suite
from rlplace.cluster.types import Link
from rlplace.plan.check import check
from rlplace.plan.testing import chain, cluster, round_kind
from rlplace.plan.types import Instance
from rlplace.planners.dynamic import dynamic
from rlplace.planners.exhaustive import exhaustive
from rlplace.planners.overlap import overlap
from rlplace.planners.types import Budget, PlannerResult

_FAST, _SLOW = round_kind("fast", overlap=0.9), round_kind("slow", 0.5, overlap=0.9)
_LINK = Link(50e9, 1e-6)


def _planned(instance: Instance, evaluations: int = 10_000) -> PlannerResult:
    return overlap(instance, Budget(evaluations=evaluations), np.random.default_rng(0))


def _seconds(result: PlannerResult) -> float:
    assert result.estimate is not None
    return result.estimate.step_time


def test_near_the_best_of_all_plans() -> None:
    gaps = []
    for problem in suite("tiny", 7):
        best = exhaustive(problem.instance, Budget(), np.random.default_rng(0))
        gaps.append(_seconds(_planned(problem.instance)) / _seconds(best) - 1.0)
    assert np.mean(gaps) <= 0.01
    assert max(gaps) <= 0.05


def test_kinds_follow_one_another_in_any_order() -> None:
    # The heavy group in the middle is for the fast device, and what is before and behind it not;
    # replicas would have to sum gradients over a slow link.
    instance = Instance(
        chain([1e9, 2e9, 1e9], floats=1e3, params=10**8),
        cluster([[_SLOW, _FAST, _SLOW]], intra=Link(1e9, 1e-6)),
        16,
        zero_levels=(0,),
        recompute_modes=("none",),
    )
    plan = _planned(instance).plan
    assert plan is not None
    check(instance, plan)
    kinds = [instance.cluster.devices[stage.mesh.devices[0]].kind for stage in plan.stages]
    assert kinds == ["slow", "fast", "slow"]


def test_of_a_step_the_first_groups_reduce_less_because_nothing_hides_them() -> None:
    # ZeRO-2 reduces half of what plain data parallelism does, but gathers after the step: worth it
    # only where no backward is left to hide behind, which is at the first group.
    instance = Instance(
        chain([4e9, 4e9, 4e9], floats=1e3, params=10**7),
        cluster([[round_kind("a", overlap=1.0)] * 2], intra=Link(20e9, 1e-6)),
        2,
        zero_levels=(0, 2),
        recompute_modes=("none",),
    )
    result = _planned(instance)
    best = exhaustive(instance, Budget(), np.random.default_rng(0))
    assert _seconds(result) == pytest.approx(_seconds(best), rel=1e-9)


@pytest.mark.parametrize("index", [1, 40])
def test_never_worse_than_the_simpler_program(index: int) -> None:
    instance = suite("random-dev")[index].instance
    other = dynamic(instance, Budget(), np.random.default_rng(0))
    assert _seconds(_planned(instance)) <= _seconds(other) * 1.005


def test_replicas_of_unequal_devices_have_unequal_shares() -> None:
    # One group cannot be cut into stages: two devices are replicas, of which one is twice as quick.
    instance = Instance(
        chain([1e9], floats=1e3, params=10),
        cluster([[_FAST, _SLOW]], intra=Link(500e9, 1e-9)),
        12,
        zero_levels=(0,),
        recompute_modes=("none",),
    )
    result = _planned(instance)
    assert result.plan is not None
    check(instance, result.plan)
    (stage,) = result.plan.stages
    assert stage.shares[0] == 2 * stage.shares[1]
    even = exhaustive(instance, Budget(), np.random.default_rng(0))
    assert _seconds(result) == pytest.approx(_seconds(even) * 2 / 3, rel=0.01)


def test_replicas_that_do_not_divide_the_batch_share_it() -> None:
    # Three samples on two equal devices: two and one, which no equal shares can be.
    instance = Instance(
        chain([1e9], floats=1e3, params=10),
        cluster([[_FAST] * 2], intra=Link(500e9, 1e-9)),
        3,
        zero_levels=(0,),
        recompute_modes=("none",),
    )
    result = _planned(instance)
    assert result.plan is not None
    check(instance, result.plan)
    (stage,) = result.plan.stages
    assert sorted(stage.shares) == [1, 2]
    even = exhaustive(instance, Budget(), np.random.default_rng(0))
    assert _seconds(result) == pytest.approx(_seconds(even) * 2 / 3, rel=0.01)
