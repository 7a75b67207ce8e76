from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from rlplace.graph.layouts import solve
from rlplace.graph.program import export_program, extract
from rlplace.graph.sharding.nodes import op_name, written_args
from rlplace.runtime.shard_check import Case, deviation
from tests.graph.thread_axis import on_threads


class _Columns(nn.Module):
    """A linear layer whose columns the search would cut, and what is done to them."""

    def __init__(self, change: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first = nn.Linear(16, 64, dtype=torch.float64)
        self.second = nn.Linear(64, 16, dtype=torch.float64)
        self.change = change

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.second(self.change(self.first(x)))
        return out


def _part_of_the_columns(hidden: Tensor) -> Tensor:
    hidden[:, 16:32].mul_(2.0)
    return hidden


def _a_view_of_a_view(hidden: Tensor) -> Tensor:
    hidden.view(-1, 2, 32)[:, 1, 16:].mul_(2.0)
    return hidden


def _the_base_of_a_view(hidden: Tensor) -> Tensor:
    part = hidden[:, 16:32]
    hidden.mul_(2.0)
    return torch.cat([part, part, part, part], 1) + hidden


@pytest.mark.parametrize("change", [_part_of_the_columns, _a_view_of_a_view, _the_base_of_a_view])
def test_what_is_written_through_a_view_is_seen_by_all_of_its_memory(
    change: Callable[[Tensor], Tensor],
) -> None:
    model, x = _Columns(change), torch.randn(3, 16, dtype=torch.float64)
    program = export_program(model, (x,))
    piece = extract(program, [node.name for node in program.nodes], device="cpu")
    states = dict(model.named_parameters())
    given = [states[name].detach().requires_grad_() for _, name in piece.states]
    assignment = solve(piece, 2, [*(place for place, _ in piece.states), *piece.inputs])

    assert assignment is not None
    case = Case("view", piece, assignment, [*given, x.requires_grad_()])
    for each in on_threads(2, lambda axis: deviation(case, axis)):
        assert each.outputs < 1e-12
        assert each.gradients < 1e-12


def test_a_view_must_be_of_the_value_itself_while_a_later_node_writes() -> None:
    def change(hidden: Tensor) -> Tensor:
        before = hidden.view(-1, 4, 16)
        hidden.mul_(2.0)
        return (before.sum() + hidden.view(-1, 8, 8).sum()) * hidden

    program = export_program(_Columns(change), (torch.randn(3, 16, dtype=torch.float64),))
    views = [node for node in program.nodes if op_name(node) == "view"]
    (scaled,) = (node for node in program.nodes if op_name(node) == "mul_")

    assert [arg.name for arg in written_args(views[0])] == ["linear"]
    assert written_args(views[1]) == []
    assert [arg.name for arg in written_args(scaled)] == ["linear"]
