"""Tests of islands composed into a pipeline."""

from __future__ import annotations

import numpy as np
import pytest

from rlplace.plan.testing import chain, cluster, round_kind, transformer
from rlplace.plan.types import Instance, Plan
from rlplace.planners.dynamic import dynamic
from rlplace.planners.tangram import tangram
from rlplace.planners.types import Budget, PlannerResult

_FAST, _SLOW = round_kind("fast"), round_kind("slow", 0.25)


def plan_of(result: PlannerResult) -> Plan:
    assert result.plan is not None
    return result.plan


def search(instance: Instance, evaluations: int = 400) -> PlannerResult:
    return tangram(instance, Budget(evaluations=evaluations), np.random.default_rng(0))


def test_slices_take_equal_times() -> None:
    # A device four times as fast gets four of five layers; nothing else is as even.
    instance = Instance(chain([1e10] * 10, floats=1e3), cluster([[_FAST], [_SLOW]]), 64)
    plan = plan_of(search(instance))
    kinds = [instance.cluster.devices[stage.mesh.devices[0]].kind for stage in plan.stages]
    sizes = {kind: s.stop - s.start for kind, s in zip(kinds, plan.stages, strict=True)}
    assert sizes == {"fast": 8, "slow": 2}


def test_a_stage_never_leaves_its_island() -> None:
    clusters = cluster([[_FAST, _SLOW]] * 3)
    plan = plan_of(search(Instance(transformer(6), clusters, 12)))
    for stage in plan.stages:
        assert len({clusters.devices[device].kind for device in stage.mesh.devices}) == 1


def test_blocks_of_an_island_have_one_shape() -> None:
    clusters = cluster([[_FAST] * 4, [_SLOW] * 2])
    plan = plan_of(search(Instance(transformer(8), clusters, 16)))
    shapes: dict[str, set[tuple[int, int, int]]] = {}
    for stage in plan.stages:
        mesh = stage.mesh
        kind = clusters.devices[mesh.devices[0]].kind
        shapes.setdefault(kind, set()).add((mesh.dp_replicate, mesh.dp_shard, mesh.tp))
    assert all(len(of) == 1 for of in shapes.values())


def test_an_island_that_only_hurts_stays_idle() -> None:
    # A layer on the slow device alone takes longer than all ten on the fast one.
    crawl = round_kind("crawl", 0.01)
    instance = Instance(chain([1e10] * 10, floats=1e3), cluster([[_FAST], [crawl]]), 64)
    result = search(instance)
    assert len(plan_of(result).stages) == 1
    assert result.idle == (1,)


@pytest.mark.parametrize("batch", [1, 7, 12])
def test_near_the_program_that_knows_all_kinds(batch: int) -> None:
    instance = Instance(transformer(6), cluster([[_FAST] * 4, [_SLOW] * 2]), batch)
    found = search(instance)
    other = dynamic(instance, Budget(evaluations=400), np.random.default_rng(0))
    assert found.estimate is not None
    assert other.estimate is not None
    assert found.estimate.step_time < 1.3 * other.estimate.step_time
