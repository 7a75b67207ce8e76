"""What must never happen to a pipeline split: a layer lost or doubled, or an empty stage.

Megatron-LM#468 and #1304 (30 layers on 4 stages), DeepSpeed#5078 (42 layers on 16 stages, 38 on
8). The ranks are simulated: one process runs the module of each stage after the other.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor

import rlplace
from rlplace.graph.library import spec
from rlplace.graph.program import export_program
from rlplace.plan.types import Instance
from rlplace.plan.uniform import layer_keys
from rlplace.runtime.local import LocalStates
from rlplace.runtime.model import Model, user_inputs
from rlplace.runtime.split import split
from rlplace.runtime.validate import stand_in_cluster

BATCH = 2
SPLITS = [(30, 4, {7, 8}), (42, 16, {2, 3}), (38, 8, {4, 5})]


@pytest.mark.parametrize(("layers", "stages", "counts"), SPLITS)
def test_each_layer_runs_once(layers: int, stages: int, counts: set[int]) -> None:
    shape: dict[str, Any] = {"layers": layers, "hidden": 16, "heads": 2, "ffn": 16, "vocab": 32}
    shape |= {"seq_len": 4, "tie_embeddings": False}
    wanted, graph = spec("gpt", **shape), rlplace.library.build("gpt", **shape)
    instance = Instance(graph, stand_in_cluster(stages), BATCH, precision="fp32")
    plan = rlplace.uniform_plan(instance, pp=stages, micro_batches=1, balance="layers")

    keys = layer_keys(graph)
    held = [{key for key in keys[stage.start : stage.stop] if key} for stage in plan.stages]
    assert {len(own) for own in held} == counts
    assert Counter(key for own in held for key in own) == dict.fromkeys(filter(None, keys), 1)

    torch.manual_seed(0)
    module = wanted.make().train()
    batch = wanted.example(BATCH, seed=1)
    model = Model(module, export_program(module, (), batch), graph)
    states = LocalStates(model.states(), torch.device("cpu"))
    modules = [split(model.program, graph, plan, index, states) for index in range(stages)]
    names = Counter(name for own in modules for name, _ in own.named_parameters())
    assert names == dict.fromkeys((name for name, _ in module.named_parameters()), 1)

    values: dict[str, Tensor] = {}
    inputs = user_inputs(model.program, batch, BATCH)
    for own in modules:
        values = own(inputs, values, BATCH)
    (found,) = values.values()
    torch.autograd.backward(found)
    loss = module(**batch)
    loss.backward()
    assert torch.equal(found, loss)
    for name, param in (pair for own in modules for pair in own.named_parameters()):
        whole = module.get_parameter(name).grad
        assert param.grad is not None
        assert whole is not None
        assert torch.equal(param.grad, whole), name
