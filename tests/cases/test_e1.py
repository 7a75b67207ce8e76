"""Redoing the core attention frees score matrices, and a flash kernel has none (Megatron-LM#1225).

There it went from 25.52 to 24.94 GB, 2.3 %, with flash attention.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest

import rlplace
from rlplace.cluster.types import Cluster
from rlplace.errors import InputError
from rlplace.graph.types import OpGraph
from rlplace.plan.types import RECOMPUTE_MODES, GroupChoice, Mesh
from rlplace.planners.dynamic import dynamic
from rlplace.planners.grid import grid
from rlplace.planners.remedies import smallest_changes
from rlplace.planners.stage_solver import StageSolver
from rlplace.planners.types import Budget, PlannerResult

_GIB = 2**30


@cache
def _graph() -> OpGraph:
    """Layers of a GPT of the size that the report is of: 4096 tokens, heads of 128."""
    return rlplace.library.build(
        "gpt", layers=4, hidden=2048, heads=16, ffn=8192, vocab=8192, seq_len=4096, degrees=(2,)
    )


def _instance(attention: str, memory_gib: float = 80.0) -> rlplace.Instance:
    cluster = Cluster.parse("1xA100-80")
    kind = replace(cluster.kinds[0], memory=int(memory_gib * _GIB))
    return rlplace.Instance(
        _graph(),
        replace(cluster, kinds=(kind,)),
        4,
        attention=attention,
        recompute_modes=RECOMPUTE_MODES,
        memory_margin=0.0,
    )


@pytest.mark.filterwarnings("ignore:recompute=attention")
def _peaks(attention: str) -> dict[str, tuple[float, float]]:
    """Peak memory and step time by recompute mode."""
    instance = _instance(attention)
    found = {}
    for mode in RECOMPUTE_MODES:
        plan = rlplace.uniform_plan(instance, micro_batches=1, recompute=mode)  # type: ignore[arg-type]
        estimate = rlplace.estimate(instance, plan)
        found[mode] = (estimate.peak_memory[0], estimate.step_time)
    return found


@pytest.mark.filterwarnings("ignore:recompute=attention")
def test_with_flash_attention_it_frees_about_nothing() -> None:
    found = _peaks("flash")
    assert 0.97 * found["none"][0] <= found["attention"][0] <= found["none"][0]
    assert found["attention"][1] > found["none"][1], "and costs its time"
    assert found["full"][0] < found["attention"][0]


def test_with_a_math_kernel_it_frees_the_score_matrices() -> None:
    found = _peaks("math")
    # 4 samples, heads x tokens x tokens in bf16: of all layers, less what one has in backward.
    scores = 4 * 16 * 4096 * 4096 * 2
    assert 3 * scores < found["none"][0] - found["attention"][0] < 4 * scores
    assert found["attention"][0] < 0.8 * found["none"][0]
    assert found["none"][1] < found["attention"][1] < found["full"][1]


def test_it_is_an_option_only_where_it_frees_something() -> None:
    groups = _graph().groups
    attention = next(
        g.structure for g in groups if _graph().structure(g.index).work.score_floats(1)
    )
    mlp = next(group.structure for group in groups if group.name.endswith("mlp"))
    modes = ("none", "attention", "full")
    offered = {
        (kernel, structure): {
            choice.recompute
            for choice in StageSolver(replace(_instance(kernel), recompute_modes=modes)).options(
                structure, Mesh((0,))
            )
        }
        for kernel in ("flash", "math")
        for structure in (attention, mlp)
    }
    assert offered["math", attention] == {"none", "attention", "full"}
    assert offered["math", mlp] == offered["flash", mlp] == {"none", "full"}
    assert offered["flash", attention] == {"none", "full"}


def _modes(result: PlannerResult) -> set[str]:
    assert result.plan is not None
    return {choice.recompute for stage in result.plan.stages for choice in stage.choices}


def test_planners_propose_it_with_a_math_kernel_and_never_with_flash() -> None:
    budget, rng = Budget(evaluations=200), np.random.default_rng(0)
    none, attention = (_peaks("math")[mode][0] for mode in ("none", "attention"))
    tight = _instance("math", 0.5 * (none + attention) / _GIB)
    one = replace(tight, global_batch=4)
    for planner in (grid, dynamic):
        found = planner(one, budget, rng)
        without = planner(replace(one, recompute_modes=("none", "full")), budget, rng)
        assert found.estimate is not None
        assert without.estimate is not None
        assert found.estimate.step_time <= without.estimate.step_time
        flash = _instance("flash", 0.5 * (none + attention) / _GIB)
        assert "attention" not in _modes(planner(flash, budget, rng))
    only = replace(one, recompute_modes=("attention",))
    assert _modes(grid(only, budget, rng)) == {"none", "attention"}


def test_who_asks_for_it_with_flash_is_told() -> None:
    instance = _instance("flash")
    plan = rlplace.uniform_plan(instance, recompute="attention")
    with pytest.warns(UserWarning, match="frees about nothing with a flash kernel"):
        rlplace.estimate(instance, plan)
    stage = plan.stages[0]
    choices = (replace(stage.choices[0], recompute="attention"), *stage.choices[1:])
    wrong = replace(plan, stages=(replace(stage, choices=choices),))
    with pytest.raises(InputError, match="has no core attention to redo"):
        rlplace.estimate(instance, wrong)
    assert GroupChoice().recompute == "none"
    assert "attention" not in rlplace.Instance(_graph(), instance.cluster, 4).recompute_modes


def test_where_nothing_fits_the_kernel_is_the_remedy() -> None:
    """One micro-batch of one sample, on a card that the score matrices of one layer overfill."""
    graph = _graph()
    one = replace(_instance("math"), global_batch=1, recompute_modes=("none",))
    whole = rlplace.estimate(one, rlplace.uniform_plan(one, micro_batches=1)).peak_memory[0]
    less = rlplace.estimate(
        replace(one, attention="flash"),
        rlplace.uniform_plan(replace(one, attention="flash"), micro_batches=1),
    ).peak_memory[0]
    kind = replace(one.cluster.kinds[0], memory=int(0.5 * (whole + less)))
    tight = replace(one, graph=graph, cluster=replace(one.cluster, kinds=(kind,)))
    changes = " ".join(smallest_changes(tight, seconds=20.0))
    assert "attention=flash" in changes
    kind = replace(kind, memory=int(0.98 * less))
    flash = replace(tight, attention="flash", cluster=replace(one.cluster, kinds=(kind,)))
    assert "attention" not in " ".join(smallest_changes(flash, seconds=20.0))
