from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from rlplace.errors import InputError
from rlplace.graph.capture import capture
from rlplace.graph.program import Program, export_program
from rlplace.graph.types import OpGraph
from rlplace.plan.types import Instance, Plan
from rlplace.plan.uniform import uniform_plan
from rlplace.runtime.validate import stand_in_cluster, validate

EXAMPLE = {"x": torch.zeros(2, 3)}


class Net(nn.Module):
    """Returns the mean, or as many numbers as there are samples."""

    def __init__(self, scalar: bool = True) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.scalar = scalar

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x)
        return out.mean() if self.scalar else out.mean(1)


@functools.cache
def exported() -> tuple[Program, OpGraph]:
    return export_program(Net(), (), EXAMPLE), capture(Net(), (), EXAMPLE)


def plan(**degrees: int) -> Plan:
    instance = Instance(exported()[1], stand_in_cluster(2), 4, precision="fp32")
    return uniform_plan(instance, **degrees)  # type: ignore[arg-type]


def test_a_legal_plan_passes() -> None:
    program, graph = exported()
    validate(plan(), graph, program, 2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"graph": "0" * 16}, "made for another graph"),
        ({"precision": "fp16-mixed"}, "the runtime executes fp32, bf16, bf16-mixed"),
        ({"precision": "fp8-mixed"}, "the runtime executes fp32, bf16, bf16-mixed"),
        ({"micro_batches": 3}, "must divide the global batch of 4"),
        ({"schedule": "zigzag"}, "must be one of gpipe, 1f1b"),
        ({"loss_chunks": 4}, "no cross entropy whose tokens could go in chunks"),
        ({"fused": True}, "runs op by op"),
    ],
)
def test_what_cannot_run_is_refused(change: dict[str, object], message: str) -> None:
    program, graph = exported()
    with pytest.raises(InputError, match=message):
        validate(replace(plan(), **change), graph, program, 2)  # type: ignore[arg-type]


def test_too_few_ranks_are_refused() -> None:
    program, graph = exported()
    with pytest.raises(InputError, match=r"torchrun started 1 ranks, the plan uses 2.*node 2"):
        validate(plan(), graph, program, 1)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_every_zero_level_is_executed(zero: int) -> None:
    program, graph = exported()
    validate(plan(dp_shard=2, zero=zero), graph, program, 2)


def test_a_model_without_a_scalar_loss_is_refused() -> None:
    net = Net(scalar=False)
    graph = capture(net, (), EXAMPLE)
    program = export_program(net, (), EXAMPLE)
    instance = Instance(graph, stand_in_cluster(1), 4, precision="fp32")
    with pytest.raises(InputError, match="must be the mean loss, a scalar"):
        validate(uniform_plan(instance), graph, program, 1)
