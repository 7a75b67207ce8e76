"""Every recompute mode gives the same bits, and keeps about as much as the estimate says."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from rlplace.cost import memory
from rlplace.graph.library import Argument, build, spec
from rlplace.graph.program import export_program
from rlplace.graph.types import OpGraph
from rlplace.plan.types import Instance, Plan
from rlplace.plan.uniform import uniform_plan
from rlplace.runtime.local import LocalStates
from rlplace.runtime.memory import ActivationTracker, LiveTracker
from rlplace.runtime.model import Model, user_inputs
from rlplace.runtime.parts import StageModule
from rlplace.runtime.split import split
from rlplace.runtime.validate import stand_in_cluster
from rlplace.simulate.stages import boundaries, boundary_bytes

BATCH = 2
SHAPE: dict[str, Argument] = {
    "layers": 2,
    "hidden": 64,
    "heads": 4,
    "ffn": 256,
    "vocab": 96,
    "seq_len": 64,
}
MODELS: dict[str, tuple[str, dict[str, Argument]]] = {
    "gpt": ("gpt", {**SHAPE}),
    "gpt-dropout": ("gpt", {**SHAPE, "dropout": 0.1}),
    "llama": ("llama", {**SHAPE, "kv_heads": 2}),
}
MODES = ("none", "attention", "ops", "full", "layer")
KERNELS = ("flash", "math")


@functools.cache
def made(name: str) -> Model:
    family, args = MODELS[name]
    wanted = spec(family, **args)  # type: ignore[arg-type]
    torch.manual_seed(0)
    module = wanted.make().train()
    graph = build(family, **args)  # type: ignore[arg-type]
    return Model(module, export_program(module, (), wanted.example(2)), graph)


def plan_of(graph: OpGraph, mode: str, kernel: str) -> tuple[Instance, Plan]:
    cluster = stand_in_cluster(1)
    instance = Instance(graph, cluster, BATCH, precision="fp32", attention=kernel)
    return instance, uniform_plan(instance, recompute=mode)  # type: ignore[arg-type]


def stage_of(name: str, mode: str, kernel: str) -> tuple[StageModule, dict[str, Any]]:
    model = made(name)
    states = LocalStates(model.states(), torch.device("cpu"))
    stage = split(model.program, model.graph, plan_of(model.graph, mode, kernel)[1], 0, states)
    family, args = MODELS[name]
    batch = spec(family, **args).example(BATCH, 1)  # type: ignore[arg-type]
    return stage, user_inputs(model.program, batch, BATCH)


def step(name: str, mode: str, kernel: str) -> tuple[list[Tensor], int, int]:
    """The loss and the gradients; bytes kept as the tracker sees it and as storages live."""
    stage, inputs = stage_of(name, mode, kernel)
    tracker, live = ActivationTracker([*stage.parameters(), *stage.buffers()]), LiveTracker()
    stage.hold = tracker.hold
    chosen = [SDPBackend.MATH] if kernel == "math" else [*SDPBackend.__members__.values()][1:]
    with live, sdpa_kernel(chosen):
        with tracker.watching():
            (loss,) = stage(inputs, {}, 5).values()
        kept, alive = tracker.current, live.current
        torch.autograd.backward(loss)
    grads = [param.grad for param in stage.parameters() if param.grad is not None]
    return [loss.detach(), *grads], kept, alive


@pytest.mark.filterwarnings("ignore:recompute=attention frees")
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("mode", MODES[1:])
def test_every_mode_gives_the_same_bits(name: str, mode: str, kernel: str) -> None:
    wanted, most, _ = step(name, "none", kernel)
    found, kept, _ = step(name, mode, kernel)
    assert len(found) == len(wanted)
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    if (mode, kernel) != ("attention", "flash"):
        assert kept < most


@pytest.mark.filterwarnings("ignore:recompute=attention frees")
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("name", ["gpt", "llama"])
@pytest.mark.parametrize("mode", MODES)
def test_as_much_is_kept_as_the_estimate_says(name: str, mode: str, kernel: str) -> None:
    instance, plan = plan_of(made(name).graph, mode, kernel)
    (stage,) = plan.stages
    wanted = 0.0
    reads = boundaries(instance.graph)
    for group, choice in enumerate(stage.choices):
        layout = instance.graph.structure(group).layouts_at(1)[0]
        boundary = boundary_bytes(instance, reads[group], BATCH)
        wanted += memory.saved(instance, layout, choice, BATCH, boundary)
    _, kept, alive = step(name, mode, kernel)
    assert kept == pytest.approx(wanted, rel=0.1)
    assert alive == pytest.approx(wanted, rel=0.1)
