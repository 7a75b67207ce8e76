"""Rules take the first step of their ladder on which something fits."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from rlplace.plan.testing import cluster, round_kind, transformer
from rlplace.plan.types import Instance, Plan
from rlplace.plan.uniform import uniform_plan
from rlplace.planners.registry import PLANNERS
from rlplace.planners.types import Budget
from rlplace.simulate.estimate import estimate

_GRAPH = transformer(4, 256)


def _instance(memory: float, **changes: object) -> Instance:
    """Two nodes of four devices; the states of the whole model are 59 MB."""
    asked = Instance(_GRAPH, cluster([[round_kind(memory=memory)] * 4] * 2), 16, memory_margin=0.0)
    return replace(asked, **changes)  # type: ignore[arg-type]  # fields of an instance


def _plan(planner: str, instance: Instance) -> Plan:
    result = PLANNERS[planner](instance, Budget(), np.random.default_rng(0))
    assert result.plan is not None
    return result.plan


def _degrees(plan: Plan) -> tuple[int, int, int]:
    return len(plan.stages), plan.stages[0].mesh.tp, plan.stages[0].mesh.dp


def test_what_fits_is_not_cut() -> None:
    assert _degrees(_plan("megatron", _instance(1e9))) == (1, 1, 8)
    assert _degrees(_plan("layouts_advice", _instance(1e9))) == (1, 1, 8)


def test_megatron_takes_tensor_parallelism_within_a_node_before_stages() -> None:
    found = [
        _degrees(_plan("megatron", _instance(s, zero_levels=(0,)))) for s in (45e6, 20e6, 12e6)
    ]
    assert found[0] == (1, 2, 4)
    assert found[1] == (1, 4, 2)
    assert found[2] == (2, 4, 1)


def test_megatron_redoes_activations_only_where_nothing_fits_without() -> None:
    roomy = Instance(transformer(4, 256, seq_len=2048), cluster([[round_kind()]]), 4)
    peaks = {
        mode: max(estimate(roomy, uniform_plan(roomy, micro_batches=4, recompute=mode)).peak_memory)
        for mode in ("none", "full")
    }
    memory = (peaks["none"] + peaks["full"]) / 2
    tight = replace(roomy, cluster=cluster([[round_kind(memory=memory)]]), memory_margin=0.0)
    modes = [
        {choice.recompute for choice in _plan("megatron", instance).stages[0].choices}
        for instance in (roomy, tight)
    ]
    assert modes == [{"none"}, {"full"}]


def test_the_advice_is_one_sample_no_recompute_and_the_smallest_product() -> None:
    for memory, product in ((1e9, 1), (45e6, 2), (20e6, 4), (12e6, 6)):
        instance = _instance(memory, zero_levels=(0,))
        plan = _plan("layouts_advice", instance)
        pp, tp, dp = _degrees(plan)
        assert pp * tp == product
        assert plan.micro_batch == dp
        assert {choice.recompute for stage in plan.stages for choice in stage.choices} == {"none"}


@pytest.mark.parametrize(("planner", "level"), [("zero1", 1), ("zero2", 2), ("zero3", 3)])
def test_a_zero_level_is_that_of_every_group(planner: str, level: int) -> None:
    plan = _plan(planner, _instance(1e9))
    assert {choice.zero for stage in plan.stages for choice in stage.choices} == {level}
    assert plan.stages[0].mesh.dp_shard == 8
    without = replace(_instance(1e9), zero_levels=(0,))
    assert PLANNERS[planner](without, Budget(), np.random.default_rng(0)).plan is None
