from __future__ import annotations

import functools

import torch
from torch import Tensor, nn

from rlplace.graph.library import spec
from rlplace.graph.program import Program, export_program
from rlplace.runtime.ordered import Ordered, ordered
from tests.runtime.reference import MODELS


@functools.cache
def mixtral() -> Program:
    name, args = MODELS["mixtral"]
    model = spec(name, **args)  # type: ignore[arg-type]  # a dict has one type of values
    with torch.device("meta"):
        module = model.make()
    example = model.example(2)
    assert isinstance(example, dict)
    return export_program(module, (), example)


def held(marks: dict[str, Ordered], target: str) -> list[str]:
    """What the values of some op hold, or ``-`` where they are in no order."""
    nodes = [node for node in mixtral().nodes if str(node.target) == target]
    return [marks[node.name].holds if node.name in marks else "-" for node in nodes]


def test_the_tokens_of_a_mixture_are_in_order_between_the_sort_and_its_inverse() -> None:
    marks = ordered(mixtral())
    assert held(marks, "aten.floor_divide.default") == ["places"]
    assert held(marks, "aten.cumsum.default") == ["numbers"]
    assert held(marks, "aten.argsort.default") == ["inverse"]
    assert held(marks, "transformers.grouped_mm_fallback.default") == ["rows", "rows"]
    assert held(marks, "aten.silu.default") == ["rows"]
    # Rows that are taken by their places are in order; by the inverse, they are put back.
    assert held(marks, "aten.index.Tensor") == ["rows", "rows", "-"]
    assert held(marks, "aten.linear.default") == ["-"] * 6
    assert {mark.key.name for mark in marks.values()} == {"reshape_3"}


class Ranked(nn.Module):
    """Puts its samples in order, and does something to them there."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layer, self.last, self.kind = nn.Linear(3, 3), nn.Linear(3, 3), kind

    def forward(self, x: Tensor) -> Tensor:
        scores = self.layer(x).sum(1)
        order = torch.argsort(scores)
        rows = self.layer(x)[order]
        if self.kind == "running":
            rows = rows.cumsum(0)
        if self.kind == "mixed":
            rows = rows + x
        if self.kind == "summed":
            rows = rows.sum(0, keepdim=True)
        out: Tensor = self.last(rows).mean()
        return out


def last(kind: str) -> str:
    """What the last value with rows holds."""
    program = export_program(Ranked(kind), (), {"x": torch.zeros(2, 3)})
    marks = ordered(program)
    before = program.nodes[-2]  # what the last linear gives
    return marks[before.name].holds if before.name in marks else "-"


def test_what_mixes_rows_of_an_order_is_not_known() -> None:
    assert last("") == "rows"
    assert last("running") == "unknown"
    assert last("mixed") == "unknown"
    assert last("summed") == "-"
