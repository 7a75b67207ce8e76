"""Whole experts on each device, for the experts of a tiny Mixtral; on ranks: `test_owned_rules`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from rlplace.graph.layouts import find_layouts, solve
from rlplace.graph.program import Piece
from rlplace.graph.sharding.axis import MetaAxis, use_axis
from rlplace.graph.sharding.axis_experts import own_rows, put_rows
from rlplace.graph.sharding.expert_rules import GROUPED, Routed, expert_pins
from rlplace.graph.sharding.lower import Assignment
from rlplace.graph.sharding.nodes import op_name, tensor_args
from rlplace.graph.types import Layout, Partial, Shard
from rlplace.runtime.shard_check import Case, Deviation, deviation
from tests.graph import expert_pieces as pieces
from tests.graph.thread_axis import on_threads

EXPERTS, TOP_K, HIDDEN, FFN = pieces.EXPERTS, pieces.TOP_K, pieces.HIDDEN, pieces.FFN
LENGTH, BATCH = pieces.LENGTH, pieces.BATCH


def _pieces() -> tuple[Piece, Piece, list[Any], tuple[str, ...]]:
    group = pieces.mixtral()
    return group.piece, group.meta, group.inputs, group.grads


def _experts(degree: int) -> Assignment:
    piece, _, _, grads = _pieces()
    assignment = solve(piece, degree, grads, expert_pins(piece, degree))
    assert assignment is not None
    return assignment


def _layout(degree: int) -> Layout:
    _, meta, _, grads = _pieces()
    roles: Any = ["param"] * len(meta.states) + ["activation"]
    (layout,) = [each for each in find_layouts(meta, degree, roles, grads) if each.name == "expert"]
    return layout


@pytest.mark.parametrize("degree", [2, 4])
def test_each_device_runs_its_own_experts_and_the_sum_is_made_once(degree: int) -> None:
    piece, _, _, _ = _pieces()
    assignment = _experts(degree)
    first, second = (n for n in piece.module.graph.nodes if op_name(n) in GROUPED)

    routed = Routed(0, ends=tensor_args(first)[2].name)
    assert assignment.strategy(first).output == routed
    assert assignment.strategy(second).reads[0] == routed
    assert assignment.strategy(second).output == Partial()
    assert sorted(n for n, p in assignment.states.items() if p == Shard(0)) == [
        place for place, name in sorted(piece.states) if "experts" in name
    ]


@pytest.mark.parametrize("degree", [2, 4])
def test_outputs_gradients_and_traffic_on_threads(degree: int) -> None:
    piece, _, inputs, _ = _pieces()
    case = Case("experts", piece, _experts(degree), inputs)

    worst: list[Deviation] = on_threads(degree, lambda axis: deviation(case, axis))

    rows = BATCH * LENGTH * TOP_K
    for each in worst:
        assert each.outputs < 1e-12
        assert each.gradients < 1e-12
        assert [(sent[0], sent[1]) for sent in each.sent] == [("all_reduce", rows * HIDDEN)] * 2


@pytest.mark.parametrize("degree", [2, 4])
def test_the_layout_says_what_is_sent_and_shares_the_work(degree: int) -> None:
    layout, whole = _layout(degree), _layout(2)

    rows = LENGTH * TOP_K
    sent = [(c.kind, c.phase, c.floats(BATCH)) for c in layout.collectives]
    assert sent == [
        ("all_reduce", "forward", BATCH * rows * HIDDEN),
        ("all_reduce", "backward", BATCH * rows * HIDDEN),
    ]
    grouped = 2.0 * rows * (HIDDEN * 2 * FFN + FFN * HIDDEN)
    router = 2.0 * LENGTH * HIDDEN * EXPERTS
    assert layout.work.flops(BATCH) == BATCH * (grouped / degree + router)
    experts = EXPERTS * 3 * FFN * HIDDEN
    assert layout.work.params == experts // degree + EXPERTS * HIDDEN
    assert layout.work.saved(BATCH) < whole.work.saved(BATCH) or degree == 2


def test_experts_that_the_degree_does_not_divide_stay_where_they_are() -> None:
    piece, _, _, _ = _pieces()

    assert expert_pins(piece, 3) == {}
    assert expert_pins(piece, 8) == {}
    assert set(expert_pins(piece, 4).values()) == {Shard(0)}


def test_without_pinned_experts_no_value_is_routed() -> None:
    piece, _, _, grads = _pieces()
    assignment = solve(piece, 2, grads)

    assert assignment is not None
    outputs = [strategy.output for strategy in assignment.strategies.values()]
    assert not any(isinstance(output, Routed) for output in outputs)


@pytest.mark.parametrize("ends", [[2, 2, 5, 8], [0, 0, 0, 8], [8, 8, 8, 8], [0, 3, 3, 8]])
def test_the_rows_of_all_devices_are_all_rows(ends: list[int]) -> None:
    rows, counts = torch.randn(8, 3), torch.tensor(ends)

    def there_and_back(axis: Any) -> Tensor:
        with use_axis(axis):
            return put_rows(own_rows(rows, 2, counts), 2, counts, len(rows))

    first, second = on_threads(2, there_and_back)
    assert torch.equal(first + second, rows)


def test_devices_without_numbers_have_equal_shares() -> None:
    with use_axis(MetaAxis(4)):
        assert (
            own_rows(torch.empty(8, 3, device="meta"), 1, torch.empty(4, device="meta")).shape[0]
            == 2
        )
