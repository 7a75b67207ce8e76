"""Tied embeddings over a pipeline (Megatron-LM#299): a copy in the last stage, and its all-reduce.

Four layers of Qwen2-1.5B, whose embedding is tied to the head and weighs as much as five layers.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

import rlplace
from rlplace.graph.types import OpGraph
from rlplace.plan.types import GroupChoice, Mesh, Stage
from rlplace.plan.uniform import make_plan
from rlplace.planners.stage_solver import StageSolver
from rlplace.simulate.types import MemoryUse

_TABLE = 151_936 * 1536
#: Weight 2, gradient 2, fp32 master and two moments 12.
_BYTES = 16


@cache
def _graph(tied: bool) -> OpGraph:
    graph = rlplace.library.build("qwen2-1.5b", layers=4, seq_len=8192, degrees=(2,))
    return graph if tied else replace(graph, tied=())


def _instance(cluster: str, tied: bool = True) -> rlplace.Instance:
    return rlplace.Instance(_graph(tied), rlplace.Cluster.parse(cluster), 8)


def _states(use: MemoryUse) -> float:
    return use.params + use.gradients + use.optimizer


def test_the_fixture() -> None:
    graph = _graph(True)
    assert graph.tied == (("model.model.embed_tokens.weight", _TABLE),)
    layer = sum(graph.structure(group).work.params for group in (1, 2))
    assert _TABLE / layer == pytest.approx(5.0, rel=0.02)
    one = _instance("1xA100-80")
    found = rlplace.estimate(one, rlplace.uniform_plan(one, micro_batch=1))
    assert _states(found.memory[0]) == _BYTES * graph.params, "one stage holds it once"


@pytest.mark.parametrize("stages", [2, 4])
def test_the_last_stage_holds_a_copy(stages: int) -> None:
    instance = _instance(f"{stages}xA100-80")
    plan = rlplace.uniform_plan(instance, pp=stages)
    found = rlplace.estimate(instance, plan)
    held = [_states(found.memory[stage.mesh.devices[0]]) for stage in plan.stages]
    assert sum(held) == _BYTES * (instance.graph.params + _TABLE)
    assert held[0] >= _BYTES * _TABLE
    assert held[-1] >= _BYTES * _TABLE
    assert all(size < _BYTES * _TABLE for size in held[1:-1])


@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.parametrize("cluster", ["{}xA100-80", "{}x1xA100-80:ib100"])
def test_the_step_has_the_all_reduce_of_its_gradient(stages: int, cluster: str) -> None:
    """Against the same stages with a head of its own: there and back at the speed of the link."""
    steps, link = [], None
    for tied in (True, False):
        instance = _instance(cluster.format(stages), tied)
        plan = rlplace.uniform_plan(instance, pp=stages)
        steps.append(rlplace.estimate(instance, plan).step_time)
        link = instance.cluster.link(0, stages - 1)
    assert link is not None
    assert steps[0] - steps[1] == pytest.approx(2 * 2 * _TABLE / link.speed, rel=0.05)


def _v_plan(instance: rlplace.Instance, last: int) -> rlplace.Plan:
    """First and middle stage on devices 0 and 1, the last on device `last`."""
    bounds = ((0, 3), (3, 6), (6, len(instance.graph.groups)))
    stages = tuple(
        Stage(start, stop, Mesh((device,)), (GroupChoice(),) * (stop - start))
        for (start, stop), device in zip(bounds, (0, 1, last), strict=True)
    )
    return make_plan(instance, stages, 4)


def test_a_v_schedule_needs_no_copy_and_no_all_reduce() -> None:
    tied, untied = (_instance("3xA100-80", tied) for tied in (True, False))
    folded, plain = (rlplace.estimate(i, _v_plan(i, 0)) for i in (tied, untied))
    assert folded.step_time == plain.step_time
    first, second = (_states(folded.memory[device]) for device in (0, 1))
    assert first + second == _BYTES * tied.graph.params
    assert _states(plain.memory[0]) - first == _BYTES * _TABLE
    straight = rlplace.estimate(tied, _v_plan(tied, 2))
    assert sum(map(_states, straight.memory)) == _BYTES * (tied.graph.params + _TABLE)
    assert straight.step_time > rlplace.estimate(untied, _v_plan(untied, 2)).step_time


def test_tensor_parallel_ranks_hold_a_part_of_the_copy() -> None:
    instance = _instance("4xA100-80")
    one, two = (rlplace.uniform_plan(instance, pp=2, tp=tp, dp_replicate=1) for tp in (1, 2))
    last = [
        _states(rlplace.estimate(instance, plan).memory[plan.stages[1].mesh.devices[0]])
        for plan in (one, two)
    ]
    assert last[1] == pytest.approx(last[0] / 2, rel=0.01)


def test_the_solver_of_a_stage_counts_it_once() -> None:
    instance = _instance("1xA100-80")
    plan = rlplace.uniform_plan(instance, micro_batches=8)
    mesh, groups = plan.stages[0].mesh, len(instance.graph.groups)
    row = StageSolver(replace(instance, recompute_modes=("none",))).row(groups, mesh, 8, 1)
    assert row.memory[0] == pytest.approx(
        rlplace.estimate(instance, plan).peak_memory[0] - instance.cluster.kind(0).reserve
    )
