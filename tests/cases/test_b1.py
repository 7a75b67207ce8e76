"""Thirty layers on four stages (Megatron-LM#1304): each layer exactly once, balanced 7, 8, 8, 7.

`test_splits` looks at what the stages compute; here planners choose the split themselves.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
import torch

import rlplace
from rlplace.cluster.types import Cluster
from rlplace.graph.capture import capture
from rlplace.graph.library import spec
from rlplace.graph.models.make import empty
from rlplace.plan.types import Plan
from rlplace.plan.uniform import layer_keys
from rlplace.planners.registry import PLANNERS
from rlplace.planners.types import Budget

LAYERS, STAGES = 30, 4
_SHAPE = {"hidden": 1024, "ffn": 2816, "vocab": 8192, "seq_len": 1024}


@pytest.fixture(scope="module")
def instance() -> rlplace.Instance:
    """Whole layers, between an embedding and a head; no replicas can be made of 31 samples."""
    wanted = spec("llama", layers=LAYERS, heads=16, kv_heads=16, **_SHAPE)
    with torch.device("meta"):
        module = wanted.make()
    graph = capture(module, kwargs=empty(wanted.shape, 2), granularity="coarse", degrees=())
    return rlplace.Instance(graph, Cluster.parse(f"{STAGES}xA100-80"), 31)


def _layers(instance: rlplace.Instance, plan: Plan) -> list[Sequence[str]]:
    """The layers of each stage."""
    keys = layer_keys(instance.graph)
    return [[key for key in keys[stage.start : stage.stop] if key] for stage in plan.stages]


def test_a_layer_is_a_group(instance: rlplace.Instance) -> None:
    keys = [key for key in layer_keys(instance.graph) if key]
    assert len(keys) == len(set(keys)) == LAYERS


@pytest.mark.parametrize("planner", ["grid", "dynamic", "galvatron", "policy"])
def test_each_layer_is_in_one_stage_and_stages_are_balanced(
    instance: rlplace.Instance, planner: str
) -> None:
    if planner == "policy":
        plan = rlplace.place(instance, time_limit=0.2).plan
    else:
        found = PLANNERS[planner](instance, Budget(evaluations=200), np.random.default_rng(0))
        assert found.plan is not None
        plan = found.plan
    held = _layers(instance, plan)
    assert len(held) == STAGES
    assert Counter(key for own in held for key in own) == dict.fromkeys(
        filter(None, layer_keys(instance.graph)), 1
    )
    assert sorted(map(len, held)) in ([7, 7, 8, 8], [6, 8, 8, 8]), "8 is the least of the largest"


def test_the_split_by_layers(instance: rlplace.Instance) -> None:
    plan = rlplace.uniform_plan(instance, pp=STAGES, micro_batches=31, balance="layers")
    assert sorted(map(len, _layers(instance, plan))) == [7, 7, 8, 8]
