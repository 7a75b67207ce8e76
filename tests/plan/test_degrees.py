"""Degrees of the tp axis: the legal set, and what a refusal says."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rlplace.errors import InputError
from rlplace.graph.types import Cut, OpGraph
from rlplace.plan.check import check
from rlplace.plan.degrees import (
    analysed_degrees,
    refuse_degree,
    refuse_unknown_degree,
    unsharded,
    usable_degrees,
)
from rlplace.plan.testing import chain, cluster, round_kind, transformer
from rlplace.plan.types import Instance
from rlplace.plan.uniform import uniform_plan


def _grouped(kv_heads: int = 4, degrees: tuple[int, ...] = (2, 4, 8)) -> OpGraph:
    """Layers whose attention has 28 heads and a few KV heads, and a head of an odd vocabulary."""
    graph = transformer(2, degrees=degrees)
    cuts = {
        "attention": (Cut("q_proj", 7 * kv_heads), Cut("k_proj", kv_heads)),
        "mlp": (Cut("up_proj", 1024),),
    }
    structures = tuple(
        replace(
            structure,
            cuts=cuts.get(structure.hash, ()),
            layouts=() if structure.hash == "head" else structure.layouts,
        )
        for structure in graph.structures
    )
    return replace(graph, structures=structures)


_GRAPH = _grouped()
_INSTANCE = Instance(_GRAPH, cluster([[round_kind()] * 8]), 16)


def test_what_is_legal_and_what_was_analysed() -> None:
    assert _GRAPH.tp_degrees(64) == (1, 2, 4)
    assert analysed_degrees(_GRAPH) == (2, 4, 8)
    assert usable_degrees(_GRAPH) == (1, 2, 4) == _INSTANCE.offered_tp
    assert usable_degrees(chain([1.0])) == (1,)


def test_a_refusal_names_the_size_the_legal_set_and_the_nearest() -> None:
    with pytest.raises(InputError) as caught:
        uniform_plan(_INSTANCE, tp=8)
    error = caught.value
    assert (error.field, error.value, error.nearest) == ("tp", 8, 4)
    assert error.rule == (
        "does not divide q_proj 28, k_proj 4 of layers.0.attn; the legal degrees are 1, 2, 4; "
        "the nearest plan on these 8 devices has pp=1, tp=4"
    )
    refuse_degree(_GRAPH, 4, "tp")


def test_the_nearest_plan_is_one_that_the_devices_allow() -> None:
    with pytest.raises(InputError) as caught:
        uniform_plan(_INSTANCE, pp=4, tp=8)
    assert caught.value.nearest == 2, "four stages leave two devices each"
    three = replace(_INSTANCE, cluster=cluster([[round_kind()] * 3]))
    with pytest.raises(InputError) as caught:
        uniform_plan(three, tp=3)
    assert caught.value.nearest == 1


def test_check_refuses_a_plan_with_an_illegal_degree() -> None:
    legal = uniform_plan(_INSTANCE, tp=4)
    check(_INSTANCE, legal)
    stage = legal.stages[0]
    wide = replace(stage.mesh, tp=8, dp_replicate=1)
    plan = replace(legal, stages=(replace(stage, mesh=wide),))
    with pytest.raises(
        InputError, match=r"mesh\.tp=8: does not divide .*legal degrees are 1, 2, 4"
    ):
        check(_INSTANCE, plan)


def test_a_legal_degree_that_nobody_analysed() -> None:
    graph = _grouped(10, (2,))
    instance = replace(_INSTANCE, graph=graph, cluster=cluster([[round_kind()] * 10]))
    assert graph.tp_degrees(64) == (1, 2), "the MLP has 1024 columns"
    three = replace(transformer(2, degrees=(2,)))
    with pytest.raises(InputError, match=r"only at 2; capture the model with degrees=\(2, 3\)"):
        refuse_unknown_degree(three, 3, "tp")
    with pytest.raises(InputError, match="the legal degrees are 1, 2"):
        uniform_plan(instance, tp=5)
    refuse_unknown_degree(chain([1.0]), 3, "tp")


@pytest.mark.parametrize(
    ("degrees", "value", "nearest"),
    [((), (), (1,)), ((0,), 0, 1), ((2, 8), 8, 4), ((3,), 3, 2)],
)
def test_an_instance_refuses_degrees(
    degrees: tuple[int, ...], value: object, nearest: object
) -> None:
    with pytest.raises(InputError) as caught:
        replace(_INSTANCE, tp_degrees=degrees)
    assert caught.value.field == "tp_degrees"
    assert (caught.value.value, caught.value.nearest) == (value, nearest)


def test_a_tp_group_stays_inside_a_node() -> None:
    pairs = cluster([[round_kind()] * 2] * 4)
    with pytest.raises(InputError, match="no node has more than 2 equal devices"):
        replace(_INSTANCE, cluster=pairs, tp_degrees=(4,))
    assert replace(_INSTANCE, cluster=pairs, tp_degrees=(2,)).offered_tp == (2,)


def test_groups_that_run_whole_are_named() -> None:
    assert unsharded(_GRAPH, 4) == ("head",)
    assert unsharded(_GRAPH, 1) == ()
    assert unsharded(transformer(2), 4) == ()
