"""Activations grow with the tokens and shrink with what is redone (ART#913, #915).

A 27B model (64 layers, hidden 5120) with LoRA at TP4, GiB of a forward: a pair of samples of 2k
tokens 20.6, 4k 35.1, 8k 69.9, 12k 104.8; 8k with the MLP redone 37.9. Three quarters of its layers
have no softmax attention; here all have.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Literal

import pytest

import rlplace
from rlplace.cluster.types import Cluster
from rlplace.plan.types import Plan

_Redone = Literal["none", "mlp", "full"]


@cache
def _instance(tokens: int) -> rlplace.Instance:
    """Four of the layers."""
    graph = rlplace.library.build(
        "llama", layers=4, hidden=5120, heads=20, kv_heads=4, ffn=17408, vocab=8192,
        seq_len=tokens, degrees=(4,),
    )  # fmt: skip
    return rlplace.Instance(graph, Cluster.parse("4xH200"), 2)


def _plan(instance: rlplace.Instance, redone: _Redone) -> Plan:
    mode: Literal["full", "none"] = "full" if redone == "full" else "none"
    plan = rlplace.uniform_plan(
        instance, tp=4, sequence_parallel=True, micro_batches=1, recompute=mode
    )
    if redone != "mlp":
        return plan
    stage = plan.stages[0]
    choices = tuple(
        replace(choice, recompute="full") if group.name.endswith("mlp") else choice
        for choice, group in zip(stage.choices, instance.graph.groups, strict=True)
    )
    return replace(plan, stages=(replace(stage, choices=choices),))


def _activations(tokens: int, redone: _Redone) -> float:
    instance = _instance(tokens)
    found = rlplace.estimate(instance, _plan(instance, redone))
    return found.memory[0].activations


@pytest.mark.parametrize("redone", ["none", "mlp", "full"])
def test_linear_in_tokens(redone: _Redone) -> None:
    each = [_activations(tokens, redone) / tokens for tokens in (2048, 4096, 8192)]
    assert each == pytest.approx([each[0]] * 3, rel=0.01)


def test_the_more_is_redone_the_less_is_kept() -> None:
    none, mlp, full = (_activations(8192, mode) for mode in ("none", "mlp", "full"))
    assert full < mlp < none, "how far depends on the attention, which is another one there"


def test_what_is_redone_costs_its_time() -> None:
    instance = _instance(8192)
    modes: tuple[_Redone, ...] = ("none", "mlp", "full")
    times = [rlplace.estimate(instance, _plan(instance, mode)).step_time for mode in modes]
    assert times[0] < times[1] < times[2]
