from __future__ import annotations

import functools
import itertools
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rlplace.errors import InputError
from rlplace.graph.capture import capture
from rlplace.graph.program import export_program
from rlplace.graph.types import OpGraph
from rlplace.plan.types import GroupChoice, Instance, Mesh, Plan, Recompute, Stage
from rlplace.plan.uniform import make_plan
from rlplace.runtime.boundary import borders, numbers, specs, stage_of
from rlplace.runtime.local import LocalStates
from rlplace.runtime.model import Model, user_inputs
from rlplace.runtime.parts import StageModule
from rlplace.runtime.split import match, split
from rlplace.runtime.validate import stand_in_cluster


class Net(nn.Module):
    """A skip from the first layer to the last, an in-place op, running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.middle = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8))
        self.last = nn.Linear(8, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        skip = self.first(x)
        hidden = self.middle(skip)
        hidden += skip
        return F.cross_entropy(self.last(hidden.relu_()), y)


EXAMPLE = {"x": torch.zeros(2, 8), "y": torch.zeros(2, dtype=torch.long)}


@functools.cache
def made() -> Model:
    torch.manual_seed(0)
    module = Net().train()
    return Model(module, export_program(module, (), EXAMPLE), capture(module, (), EXAMPLE))


def plan_of(graph: OpGraph, bounds: list[int], recompute: Recompute = "none") -> Plan:
    stages = tuple(
        Stage(start, stop, Mesh((i,)), (GroupChoice(recompute=recompute),) * (stop - start))
        for i, (start, stop) in enumerate(itertools.pairwise(bounds))
    )
    instance = Instance(graph, stand_in_cluster(len(stages)), 6, precision="fp32")
    return make_plan(instance, stages, 1)


def stages_of(model: Model, plan: Plan) -> list[StageModule]:
    states = LocalStates(model.states(), torch.device("cpu"))
    count = len(plan.stages)
    return [split(model.program, model.graph, plan, i, states) for i in range(count)]


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_stages_in_a_row_are_the_module(recompute: Recompute) -> None:
    model = made()
    count = len(model.graph.groups)
    assert count >= 3
    plan = plan_of(model.graph, list(range(count + 1)), recompute)
    stages = stages_of(model, plan)
    batch = {"x": torch.randn(6, 8), "y": torch.randint(0, 4, (6,))}
    inputs = user_inputs(model.program, batch, 6)

    twin = Net().train()
    twin.load_state_dict(model.module.state_dict())
    torch.autograd.backward(twin(**batch))

    values: dict[str, Tensor] = {}
    for stage in stages:
        values = stage(inputs, values, 6)
    (loss,) = values.values()
    torch.autograd.backward(loss)
    for name, param in (pair for stage in stages for pair in stage.named_parameters()):
        assert param.grad is not None
        assert torch.equal(param.grad, twin.get_parameter(name).grad), name  # type: ignore[arg-type]
    for name, buffer in model.module.named_buffers():
        assert torch.equal(buffer, twin.get_buffer(name)), name


def test_stage_states_keep_their_names() -> None:
    model = made()
    plan = plan_of(model.graph, list(range(len(model.graph.groups) + 1)))
    names = [n for stage in stages_of(model, plan) for n, _ in stage.named_parameters()]
    assert sorted(names) == sorted(n for n, _ in model.module.named_parameters())


def test_a_skip_crosses_every_border_between() -> None:
    model = made()
    plan = plan_of(model.graph, list(range(len(model.graph.groups) + 1)))
    crossing = borders(model.program, stage_of(model.graph, plan), len(plan.stages))
    first = specs(model.program, crossing[0])
    assert all(spec.shape(5) == (5, 8) and spec.grad for spec in first)
    skip = {node.name for node in crossing[0]} & {node.name for node in crossing[-2]}
    assert skip, "the first linear is read again by the sum"


def test_sizes_are_worked_out_not_sent() -> None:
    class Sized(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.outer = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.inner(x).repeat(2, 1)
            result: Tensor = (self.outer(hidden) / hidden.shape[0]).sum()
            return result

    program = export_program(Sized(), (), {"x": torch.zeros(2, 4)})
    found = numbers(program.nodes)
    assert {size(7) for size in found.values()} <= {7, 14}


def test_another_graph_is_refused() -> None:
    model = made()
    groups = model.graph.groups
    other = replace(model.graph, groups=(*groups[:-1], replace(groups[-1], ops=("nothing",))))
    with pytest.raises(InputError, match=r"nothing .* is not in the model"):
        match(model.program, other)
    short = replace(model.graph, groups=groups[:-1])
    with pytest.raises(InputError, match="is in no group"):
        match(model.program, short)
