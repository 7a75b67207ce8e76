"""Tensor-parallel degrees that the heads do not allow are refused, and never proposed.

28 heads with 4 KV heads take 1, 2 and 4 (AdaptThink#1, transformers#48307); 40 with 10 take 1, 2, 5
and 10 (Automodel#799). A degree of 8 that is accepted fails later, in a view.
"""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

import rlplace
from rlplace.cli import BAD_INPUT, OK, main
from rlplace.cost.analytic import AnalyticCost
from rlplace.errors import InputError
from rlplace.graph.types import OpGraph
from rlplace.plan.check import check
from rlplace.planners.anneal import anneal
from rlplace.planners.registry import PLANNERS
from rlplace.planners.types import Budget


@cache
def _grouped(heads: int, kv_heads: int, degrees: tuple[int, ...]) -> OpGraph:
    return rlplace.library.build(
        "llama",
        layers=2,
        hidden=8 * heads,
        heads=heads,
        kv_heads=kv_heads,
        ffn=320,
        vocab=1000,
        seq_len=32,
        degrees=degrees,
    )


def _instance(graph: OpGraph, cluster: str = "8xA100-80") -> rlplace.Instance:
    return rlplace.Instance(graph, rlplace.Cluster.parse(cluster), 40)


CASES = [(28, 4, (2, 4, 8), (1, 2, 4), 4), (40, 10, (2, 5, 10), (1, 2, 5, 10), 2)]


@pytest.mark.parametrize(("heads", "kv_heads", "degrees", "legal", "nearest"), CASES)
def test_tp8_is_refused_before_any_costing(
    heads: int,
    kv_heads: int,
    degrees: tuple[int, ...],
    legal: tuple[int, ...],
    nearest: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    graph = _grouped(heads, kv_heads, degrees)
    assert graph.tp_degrees(64) == legal
    instance = _instance(graph)
    told = f"k_proj {kv_heads}.*self_attn; the legal degrees are {', '.join(map(str, legal))}"
    plan = rlplace.uniform_plan(instance, tp=2, dp_replicate=4)
    stage = plan.stages[0]
    wide = replace(stage, mesh=replace(stage.mesh, tp=8, dp_replicate=1))

    def no_cost(*_: object) -> None:
        raise AssertionError("something was costed")

    monkeypatch.setattr(AnalyticCost, "group", no_cost)
    with pytest.raises(InputError, match=told) as caught:
        rlplace.uniform_plan(instance, tp=8)
    assert (caught.value.field, caught.value.value) == ("tp", 8)
    assert caught.value.nearest == nearest
    assert f"the nearest plan on these 8 devices has pp=1, tp={nearest}" in caught.value.rule
    with pytest.raises(InputError, match=told) as caught:
        rlplace.estimate(instance, replace(plan, stages=(wide,)))
    assert caught.value.field == "plan.stages[0].mesh.tp"
    with pytest.raises(InputError, match=told) as caught:
        replace(instance, tp_degrees=(8,))
    assert (caught.value.field, caught.value.value) == ("tp_degrees", 8)


@pytest.mark.parametrize(("heads", "kv_heads", "degrees", "legal", "nearest"), CASES)
def test_every_legal_degree_makes_a_plan(
    heads: int, kv_heads: int, degrees: tuple[int, ...], legal: tuple[int, ...], nearest: int
) -> None:
    graph = _grouped(heads, kv_heads, degrees)
    for tp in legal:
        instance = _instance(graph, f"{tp}xA100-80")
        plan = rlplace.uniform_plan(instance, tp=tp)
        assert rlplace.estimate(instance, plan).feasible
        attention = plan.stages[0].choices[1]
        assert attention.layout == ("shard" if tp > 1 else "replicate")


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]} heads")
def test_no_planner_proposes_an_illegal_degree(
    case: tuple[int, int, tuple[int, ...], tuple[int, ...], int],
) -> None:
    heads, kv_heads, degrees, legal, _ = case
    instance = _instance(_grouped(heads, kv_heads, degrees))
    assert set(instance.offered_tp) <= set(legal)
    rng, budget = np.random.default_rng(0), Budget(evaluations=60)
    found = [
        planner(instance, budget, rng).plan
        for name, planner in PLANNERS.items()
        if name != "exhaustive"
    ]
    start = rlplace.uniform_plan(instance, tp=2)
    found += [anneal(instance, budget, rng, start).plan, rlplace.api.place(instance, 0.05).plan]
    for plan in found:
        assert plan is not None
        check(instance, plan)
        assert {stage.mesh.tp for stage in plan.stages} <= set(legal)


def test_a_legal_degree_that_was_not_analysed_is_told_apart() -> None:
    instance = _instance(_grouped(40, 10, (2, 5, 10)))
    bare = replace(
        instance.graph,
        structures=tuple(
            replace(s, layouts=tuple(x for x in s.layouts if x.degree == 2))
            for s in instance.graph.structures
        ),
    )
    with pytest.raises(InputError, match=r"only at 2; capture the model with degrees=\(2, 5\)"):
        rlplace.uniform_plan(replace(instance, graph=bare), tp=5, dp_replicate=1)


def test_the_command_line_refuses_and_obeys(capsys: pytest.CaptureFixture[str]) -> None:
    """llama-tiny has 4 heads and 2 KV heads."""
    ask = ["plan", "llama-tiny", "8xA100-80", "--global-batch", "16", "--time-limit", "0.05"]
    with pytest.raises(SystemExit) as ended:
        main([*ask, "--tp", "8"])
    assert ended.value.code == BAD_INPUT
    told = " ".join(capsys.readouterr().err.split())
    assert "InputError: tp_degrees=8: does not divide q_proj 4, k_proj 2, v_proj 2" in told
    assert "the legal degrees are 1, 2 (nearest legal: 2)" in told
    with pytest.raises(SystemExit) as ended:
        main([*ask, "--tp", "2", "--json"])
    assert ended.value.code == OK
    stages = json.loads(capsys.readouterr().out)["stages"]
    assert stages
    assert all(stage["mesh"].endswith("tp2") for stage in stages)
