"""PipeDream's program against all splits, and which plans it prefers where."""

from __future__ import annotations

import math

import numpy as np

from rlplace.plan.testing import chain, cluster, round_kind
from rlplace.plan.types import Instance, Plan
from rlplace.planners.pipedream import _solve, pipedream
from rlplace.planners.types import Budget

_KIND = round_kind()


def _slowest(times: np.ndarray, transfer: np.ndarray, start: int, stop: int, most: int) -> float:
    """The least slowest stage, by trying every last stage."""
    found = min((float(times[start, stop, m]) for m in range(1, most + 1)), default=math.inf)
    for split in range(start + 1, stop):
        for last in range(1, most):
            before = _slowest(times, transfer, start, split, most - last)
            found = min(found, max(before, transfer[split], times[split, stop, last]))
    return found


def test_a_level_is_the_best_of_all_splits() -> None:
    for seed in range(10):
        rng = np.random.default_rng(seed)
        times = rng.integers(1, 20, (6, 6, 5)).astype(float)
        transfer = rng.integers(0, 12, 6).astype(float)
        level = _solve(times, transfer)
        best = _slowest(times, transfer, 0, 5, 4)
        assert level.best[0, 5, 4] == best
        stages = level.stages(0, 5, 4)
        assert [a for a, _, _ in stages] == [0, *(b for _, b, _ in stages[:-1])]
        assert stages[-1][1] == 5
        assert sum(m for _, _, m in stages) <= 4
        slowest = max(times[a, b, m] for a, b, m in stages)
        assert best == max(slowest, *(transfer[a] for a, _, _ in stages[1:]), 0.0)


def _plan(instance: Instance) -> Plan:
    plan = pipedream(instance, Budget(), np.random.default_rng(0)).plan
    assert plan is not None
    return plan


def test_light_weights_are_replicated_and_heavy_ones_pipelined() -> None:
    nodes = cluster([[_KIND]] * 4)
    light = Instance(chain([1e12] * 3, floats=1e6, params=1), nodes, 8)
    (stage,) = _plan(light).stages
    assert stage.mesh.dp == 4
    heavy = Instance(chain([1e10] * 4, floats=1.0, params=10**9), nodes, 8)
    assert [s.mesh.dp for s in _plan(heavy).stages] == [1, 1, 1, 1]


def test_the_longer_stage_has_more_replicas() -> None:
    """One layer of three times the work: one replica beside three, as in the paper's plans."""
    instance = Instance(chain([3e12, 1e12], floats=1.0, params=10**8), cluster([[_KIND] * 4]), 12)
    widths = [stage.mesh.dp for stage in _plan(instance).stages]
    assert widths in ([3, 1], [4])
    assert sum(widths) == 4
