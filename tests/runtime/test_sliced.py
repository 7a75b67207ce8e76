"""Slices of weights are gathered one after the other, and the whole module is what is computed."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from rlplace.graph.capture import capture
from rlplace.graph.program import export_program
from rlplace.graph.types import Replicate
from rlplace.plan.types import GroupChoice, Instance, Mesh, Plan, Stage
from rlplace.plan.uniform import make_plan
from rlplace.runtime.aside import Aside, putting
from rlplace.runtime.assemble import Assembly
from rlplace.runtime.buckets import Replicas
from rlplace.runtime.holdings import pieces
from rlplace.runtime.local import LocalStates
from rlplace.runtime.measure import Recorder
from rlplace.runtime.model import Model
from rlplace.runtime.parts import StageModule
from rlplace.runtime.reduce import Reducer
from rlplace.runtime.split import split
from rlplace.runtime.trained import Ranked, trained
from rlplace.runtime.validate import stand_in_cluster
from rlplace.runtime.weight_slices import joined

#: Bytes of an element.
SIZE = 8


class One(nn.Module):
    """One large linear."""

    def __init__(self) -> None:
        super().__init__()
        self.large = nn.Linear(16, 64)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.large(x)
        return hidden.square().mean()


class Mixed(nn.Module):
    """All kinds of matmuls: with a bias, without, of a tuple, of one that two ops read."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.first = nn.Linear(16, 24, bias=False)
        self.transposed = nn.Parameter(torch.randn(12, 8) / 4)
        self.shift = nn.Parameter(torch.randn(8))
        self.plain = nn.Parameter(torch.randn(8, 8) / 4)
        self.twice = nn.Linear(8, 8)
        self.odd = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        left, right = self.first(self.norm(x)).chunk(2, -1)
        hidden = torch.addmm(self.shift, left * right.tanh(), self.transposed)
        hidden = F.dropout(hidden, 0.5) @ self.plain
        hidden = self.twice(self.twice(F.dropout(hidden, 0.5)))
        out: Tensor = self.odd(hidden)
        return out.square().mean()


class Frozen(nn.Module):
    """A frozen linear with a trained bias, and a trained one."""

    def __init__(self) -> None:
        super().__init__()
        self.kept = nn.Linear(16, 8)
        self.kept.weight.requires_grad_(False)
        self.trained = nn.Linear(8, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.trained(self.kept(x))
        return out.square().mean()


@functools.cache
def made(kind: type[nn.Module]) -> Model:
    torch.manual_seed(0)
    module = kind().double()
    example = {"x": torch.zeros(2, 16, dtype=torch.float64)}
    graph = capture(module, (), example, granularity=1, degrees=())
    return Model(module, export_program(module, (), example), graph)


def plan_of(model: Model, slices: int, schedule: str = "1f1b") -> Plan:
    count = len(model.graph.groups)
    stage = Stage(0, count, Mesh((0, 1), 1, 2), (GroupChoice(zero=3, slices=slices),) * count)
    return make_plan(
        Instance(model.graph, stand_in_cluster(2), 4, precision="fp32"), (stage,), 1, schedule
    )


@pytest.fixture(scope="module")
def group() -> Iterator[Any]:
    """A process group of this process alone."""
    store = dist.HashStore()  # type: ignore[attr-defined]  # torch does not export it
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def lent(model: Model, slices: int, group: Any) -> tuple[StageModule, Reducer]:
    """The one stage, as a rank of a mesh of one shard would have it."""
    plan = plan_of(model, slices)
    states = LocalStates(model.states(), torch.device("cpu"))
    stage = split(model.program, model.graph, plan, 0, states)
    place = Ranked(plan.stages[0].mesh, 0)
    reducer = Reducer(
        trained({0: stage}, plan, model, place, states.placements),
        Replicas(group, group, None, group, group),
        steps={0: len(stage.states_of_steps)},
    )
    stage.lender = reducer.lenders[0]
    return stage, reducer


def run(stage: StageModule, reducer: Reducer, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and gradients."""
    reducer.start()
    (loss,) = stage({"x": x}, {}, len(x)).values()
    with reducer.backward(0):
        torch.autograd.backward(loss)
    reducer.finish()
    reducer.complete()
    found = {key: p.grad for key, p in stage.named_parameters() if p.grad is not None}
    return loss.detach(), joined(found)


@pytest.mark.parametrize("slices", [2, 4, 8])
def test_two_slices_of_a_large_weight_are_whole_at_a_time(slices: int, group: Any) -> None:
    x, whole = torch.randn(4, 16, dtype=torch.float64), SIZE * (16 * 64 + 64)
    for count, peak in ((1, whole), (slices, 2 * whole // slices)):
        stage, reducer = lent(made(One), count, group)
        loss, gradients = run(stage, reducer, x)
        assert reducer.lent_peak == peak
        wanted = made(One).module(x)
        torch.testing.assert_close(loss, wanted.detach())
        (weight, bias) = made(One).module.parameters()
        for name, gradient in zip(
            ("large.weight", "large.bias"), torch.autograd.grad(wanted, (weight, bias)), strict=True
        ):
            torch.testing.assert_close(gradients[name], gradient)


def test_what_is_whole_at_a_time_are_two_steps_that_follow_each_other(group: Any) -> None:
    stage, reducer = lent(made(Mixed), 4, group)
    run(stage, reducer, torch.randn(4, 16, dtype=torch.float64))
    steps = [sum(SIZE * one.numel() for one in own) for own in stage.states_of_steps]
    lending = [size for size in steps if size]
    # Norm; four slices of `first`; of `transposed`, the first with `shift`; of `plain`; the rest.
    assert lending == [
        SIZE * count for count in (32, *[96] * 4, 24 + 8, *[24] * 3, *[16] * 4, 72 + 27)
    ]
    assert reducer.lent_peak == max(sum(pair) for pair in pairwise(lending)) == SIZE * 192


@pytest.mark.parametrize("slices", [1, 2, 4])
def test_slices_compute_what_the_whole_weights_do(slices: int, group: Any) -> None:
    """The second is as a plan without slices has it, with the masks that it draws."""
    torch.manual_seed(1)
    x = torch.randn(4, 16, dtype=torch.float64)
    loss, gradients = run(*lent(made(Mixed), slices, group), x)
    wanted, others = run(*lent(made(Mixed), 1, group), x)
    torch.testing.assert_close(loss, wanted)
    assert gradients.keys() == others.keys() == dict(made(Mixed).module.named_parameters()).keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, others[name], msg=name)


def test_gradients_of_slices_can_be_put_aside(group: Any) -> None:
    model = made(One)
    plan = replace(plan_of(model, 4), schedule="zb-h1")
    states = LocalStates(model.states(), torch.device("cpu"))
    stage = split(model.program, model.graph, plan, 0, states)
    keys = {f"large.{kind}[{index}/4]" for kind in ("weight", "bias") for index in range(4)}
    assert stage.put_aside == keys == {key for key, _ in stage.named_parameters()}
    aside, x = Aside(lambda tensor: tensor), torch.randn(4, 16, dtype=torch.float64)
    with putting(aside):
        (loss,) = stage({"x": x}, {}, 4).values()
        torch.autograd.backward(loss)
    assert all(param.grad is None for param in stage.parameters())
    aside.make()
    wanted = torch.autograd.grad(model.module(x), list(model.module.parameters()))
    found = joined({key: p.grad for key, p in stage.named_parameters() if p.grad is not None})
    for name, gradient in zip(("large.weight", "large.bias"), wanted, strict=True):
        torch.testing.assert_close(found[name], gradient)


@pytest.mark.parametrize("slices", [1, 4])
def test_checkpoints_know_whole_weights_alone(slices: int, group: Any) -> None:
    """Trained ones and frozen ones; what is read back goes to where it was."""
    model = made(Frozen)
    stage, reducer = lent(model, slices, group)
    module = dict(model.module.named_parameters())
    assembly = Assembly(
        Recorder(0, torch.device("cpu")),
        stages={0: stage},
        reducer=reducer,
        placements=dict.fromkeys(module, Replicate()),
        shapes={name: tuple(param.shape) for name, param in module.items()},
    )
    found = {name: torch.full_like(param, torch.nan) for name, param in module.items()}
    held = list(pieces(assembly))
    assert len(held) == (4 * 3 if slices == 4 else 3)
    for piece in held:
        name = piece.holding.item.removeprefix("weight/")
        assert piece.holding.shape == tuple(module[name].shape)
        found[name].view(-1)[piece.start : piece.stop] = piece.tensor
    for name, param in module.items():
        assert torch.equal(found[name], param.detach()), name
