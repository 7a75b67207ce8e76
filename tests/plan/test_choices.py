"""Slices of weights: what is legal, and what is named where it is not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from rlplace.errors import InputError
from rlplace.graph.types import Affine, OpGraph, Weight
from rlplace.plan.check import check
from rlplace.plan.testing import chain, cluster, round_kind
from rlplace.plan.types import GroupChoice, Instance, Mesh, Plan, Stage
from rlplace.plan.uniform import make_plan, uniform_plan


def _graph() -> OpGraph:
    """Two groups, the first with weights of 12 and 7 rows."""
    graph = chain([1.0, 1.0])
    first, second = graph.structures
    weights = (Weight(0, 12, 4, True), Weight(1, 7, 4, False))
    work = replace(first.work, weights=weights, logits_bytes=Affine(0.0, 4.0))
    return replace(graph, structures=(replace(first, work=work), second))


_INSTANCE = Instance(_graph(), cluster([[round_kind()] * 2]), 4)
_PAIR = Mesh((0, 1), 1, 2)


def _plan(instance: Instance = _INSTANCE, mesh: Mesh = _PAIR, at: int = 0, **changes: Any) -> Plan:
    choices = [GroupChoice(zero=3), GroupChoice(zero=3)]
    choices[at] = replace(choices[at], **changes)
    return make_plan(instance, (Stage(0, 2, mesh, tuple(choices)),), 1)


@pytest.mark.parametrize("slices", [1, 2, 3, 4, 6, 7, 12])
def test_slices_divide_the_rows_of_a_weight(slices: int) -> None:
    plan = _plan(slices=slices)
    check(_INSTANCE, plan)
    weights = _INSTANCE.graph.structures[0].work.weights
    cut = [plan.stages[0].choices[0].cuts(weight) for weight in weights]
    assert cut == [slices > 1 and rows % slices == 0 for rows in (12, 7)]


_CHUNKED = replace(_INSTANCE, loss_chunks=2)
BROKEN: dict[str, tuple[Instance, Plan, str, int]] = {
    "none": (_INSTANCE, _plan(slices=0), "at least one", 1),
    "no divisor": (_INSTANCE, _plan(slices=5), "divides the rows of a weight .*: 12, 7", 4),
    "too many": (_INSTANCE, _plan(slices=90), "divides the rows", 12),
    "zero 2": (_INSTANCE, _plan(slices=2, zero=2), "zero is 3", 1),
    "one shard": (_INSTANCE, _plan(mesh=Mesh((0, 1), 2), slices=2), "more than one shard", 1),
    "redone": (_INSTANCE, _plan(slices=2, recompute="ops"), "recompute is none", 1),
    "no weight": (_INSTANCE, _plan(at=1, slices=2), "layer.1 has no weight", 1),
    "loss in chunks": (_CHUNKED, _plan(_CHUNKED, slices=2), "in chunks", 1),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_rule_is_named(name: str) -> None:
    instance, plan, rule, legal = BROKEN[name]
    with pytest.raises(InputError, match=rule) as caught:
        check(instance, plan)
    at = 1 if name == "no weight" else 0
    assert caught.value.field == f"plan.stages[0].choices[{at}].slices"
    assert caught.value.nearest == legal


def test_slices_over_a_cp_axis_are_legal() -> None:
    check(_INSTANCE, _plan(slices=4))
    assert Mesh((0, 1), cp=2).shards == 2


@pytest.mark.parametrize(
    ("zero", "recompute", "chunks", "wanted"),
    [(3, "none", 1, (1, 2, 7)), (2, "none", 1, (1,)), (3, "full", 1, (1,)), (3, "none", 2, (1,))],
)
def test_what_planners_may_choose_is_legal(
    zero: int, recompute: str, chunks: int, wanted: tuple[int, ...]
) -> None:
    asked = replace(_INSTANCE, slices=(1, 2, 5, 7), loss_chunks=chunks)
    work = asked.graph.structures[0].work
    assert asked.slice_options(work, zero, recompute) == wanted
    assert _INSTANCE.slice_options(work, zero, recompute) == (1,)
    for slices in wanted:
        check(asked, _plan(asked, zero=zero, recompute=recompute, slices=slices))


def test_a_uniform_plan_has_slices_where_they_are_legal() -> None:
    plan = uniform_plan(_INSTANCE, zero=3, slices=4)
    check(_INSTANCE, plan)
    assert [choice.slices for choice in plan.stages[0].choices] == [4, 1]
    legal_apart: list[dict[str, Any]] = [
        {"zero": 2},
        {"zero": 3, "recompute": "full"},
        {"zero": 3, "pp": 2},
    ]
    for degrees in legal_apart:
        other = uniform_plan(_INSTANCE, slices=4, **degrees)
        assert {choice.slices for stage in other.stages for choice in stage.choices} == {1}
