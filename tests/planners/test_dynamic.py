"""The dynamic program against all plans there are."""

from __future__ import annotations

import numpy as np
import pytest

from rlplace.cluster.types import Link
from rlplace.plan.testing import chain, cluster, round_kind, transformer
from rlplace.plan.types import Instance
from rlplace.planners.dynamic import dynamic, micro_batch_counts
from rlplace.planners.exhaustive import all_plans
from rlplace.planners.types import Budget
from rlplace.simulate.estimate import Estimator

_FAST, _SLOW = round_kind("fast", overlap=0.5), round_kind("slow", 0.4, overlap=0.5)
_LINK = Link(50e9, 1e-5)

_TINY: dict[str, Instance] = {
    "equal": Instance(
        chain([1e9, 2e9, 2e9, 1e9], floats=1e6, params=10**6),
        cluster([[_FAST] * 3], intra=_LINK),
        6,
        zero_levels=(0,),
        recompute_modes=("none",),
    ),
    "mixed": Instance(
        chain([1e9, 4e9, 2e9, 1e9], floats=1e5, params=10**6),
        cluster([[_FAST, _SLOW, _SLOW]], intra=_LINK),
        4,
        zero_levels=(0,),
        recompute_modes=("none",),
    ),
    "nodes": Instance(
        chain([3e9, 1e9, 1e9], floats=3e6, params=10**7),
        cluster([[_FAST] * 2, [_SLOW]], intra=_LINK),
        4,
        zero_levels=(0, 3),
        recompute_modes=("none",),
    ),
    "tp": Instance(
        transformer(1, 512, degrees=(2,)),
        cluster([[_FAST] * 2], intra=_LINK),
        2,
        zero_levels=(0,),
        recompute_modes=("none",),
    ),
    "tight": Instance(
        chain([1e9, 2e9, 1e9], floats=1e6, params=10**6),
        cluster([[round_kind(memory=75e6)] * 2], intra=_LINK),
        8,
        zero_levels=(0, 3),
    ),
}


@pytest.mark.parametrize("name", _TINY)
def test_near_the_best_of_all_plans(name: str) -> None:
    instance = _TINY[name]
    estimator = Estimator(instance)
    found = [estimator.estimate(plan) for plan in all_plans(instance)]
    best = min(estimate.step_time for estimate in found if estimate.feasible)
    result = dynamic(instance, Budget(), np.random.default_rng(0))
    assert result.estimate is not None
    assert best * (1 - 1e-9) <= result.estimate.step_time <= 1.05 * best


def test_micro_batch_counts_are_legal_and_few() -> None:
    instance = Instance(chain([1.0]), cluster([[_FAST] * 4]), 5040)
    counts = micro_batch_counts(instance)
    assert counts[0] == 1
    assert len(counts) <= 7
    assert all(5040 % count == 0 and count <= 8 * 4 for count in counts)
    assert list(counts) == sorted(set(counts))


def test_many_groups_are_cut_at_chosen_places_only() -> None:
    instance = Instance(chain([1e9] * 120), cluster([[_FAST] * 4], intra=_LINK), 32)
    result = dynamic(instance, Budget(), np.random.default_rng(0))
    assert result.plan is not None
    bounds = [(stage.start, stage.stop) for stage in result.plan.stages]
    assert bounds[0][0] == 0
    assert bounds[-1][1] == 120
