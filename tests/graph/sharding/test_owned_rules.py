"""Experts on their devices and tokens on theirs: what is sent, and what must not be."""

from __future__ import annotations

from functools import cache
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from rlplace.graph.layouts import find_bordered, find_layouts, placements_of, solve
from rlplace.graph.sharding.expert_rules import GROUPED, Routed, expert_pins
from rlplace.graph.sharding.lower import Assignment
from rlplace.graph.sharding.nodes import op_name
from rlplace.graph.sharding.owned_rules import Owned, PerDevice
from rlplace.graph.types import Layout, Replicate, Shard
from rlplace.runtime.shard_check import Case, Deviation, check_ranks, deviation
from tests.graph import expert_pieces as pieces
from tests.graph.thread_axis import on_threads

EXPERTS, TOP_K, HIDDEN, FFN = pieces.EXPERTS, pieces.TOP_K, pieces.HIDDEN, pieces.FFN
LENGTH, BATCH = pieces.LENGTH, pieces.BATCH
ROWS = BATCH * LENGTH * TOP_K


def _solve(group: Any, degree: int) -> Assignment | None:
    pins, border = expert_pins(group.meta, degree), group.border("expert-sequence", degree)
    return solve(group.piece, degree, group.grads, pins, border)


@cache
def _assignment(degree: int) -> Assignment:
    found = _solve(pieces.mixtral(), degree)
    assert found is not None
    return found


@cache
def _layout(degree: int, name: str = "expert-sequence") -> Layout:
    group = pieces.mixtral()
    roles: Any = ["param"] * len(group.meta.states) + ["activation"]
    find = find_layouts if name == "expert" else find_bordered
    found = find(group.meta, degree, roles, group.grads)
    (layout,) = [each for each in found if each.name == name]
    return layout


def _random() -> list[Any]:
    inputs: list[Any] = pieces.mixtral().inputs
    return inputs


def _even() -> list[Any]:
    """Token t goes to the experts t and t + 1, counted around."""
    gate, x = torch.zeros(EXPERTS, HIDDEN, dtype=torch.float64), pieces.hidden()
    for expert in range(EXPERTS):
        gate[expert, expert], gate[(expert + 1) % EXPERTS, expert] = 2.0, 1.0
    x[..., :EXPERTS] = torch.eye(EXPERTS).repeat(LENGTH // EXPERTS, 1)
    inputs: list[Any] = pieces.mixtral().routed(gate, x)
    return inputs


def _crowded() -> list[Any]:
    """All tokens go to the first two experts: other devices get no row at all."""
    gate, x = torch.zeros(EXPERTS, HIDDEN, dtype=torch.float64), pieces.hidden()
    gate[:TOP_K, 0] = torch.tensor([2.0, 1.0])
    x[..., 0] = x[..., 0].abs() + 1.0
    inputs: list[Any] = pieces.mixtral().routed(gate, x)
    return inputs


ROUTINGS = {"random": _random, "even": _even, "crowded": _crowded}


def _table(inputs: list[Any], degree: int) -> Tensor:
    """Rows that each device sends to each other, from the router's own choice: (from, to)."""
    gate, x = inputs[0].detach(), inputs[-1].detach()
    chosen = (x @ gate.T).topk(TOP_K, -1).indices // (EXPERTS // degree)
    own = chosen.unflatten(1, (degree, -1)).transpose(0, 1).reshape(degree, -1)
    return torch.stack([row.bincount(minlength=degree) for row in own])


class _Spy:
    """An axis that writes down how many rows go where."""

    def __init__(self, axis: Any) -> None:
        self.axis, self.rows = axis, []  # type: Any, list[list[int]]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.axis, name)

    def all_to_all_rows(self, tensor: Tensor, sent: Any, got: Any) -> Tensor:
        self.rows.append(list(sent))
        out: Tensor = self.axis.all_to_all_rows(tensor, sent, got)
        return out


@pytest.mark.parametrize("degree", [2, 4])
def test_tokens_stay_and_rows_are_sent_once_each_way(degree: int) -> None:
    group, assignment = pieces.mixtral(), _assignment(degree)
    first, second = (n for n in group.piece.module.graph.nodes if op_name(n) in GROUPED)
    strategies = [assignment.strategy(node) for node in (first, second)]

    reads, outs = [s.reads[0] for s in strategies], [s.output for s in strategies]
    assert isinstance(reads[0], Owned)
    assert isinstance(outs[0], Routed)
    assert reads[1] == outs[0]
    assert outs[1] == reads[0]
    assert all(isinstance(s.reads[2], PerDevice) for s in strategies)
    assert (*assignment.reads.values(), *assignment.writes) == (Shard(1), Shard(1))
    held = placements_of(group.piece, assignment)
    assert [p for n, p in held.items() if "experts" in n] == [Shard(0)] * 2
    assert held["block.gate.weight"] == Replicate()


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("degree", [2, 4])
def test_outputs_gradients_and_the_rows_of_the_routing_table(degree: int, routing: str) -> None:
    inputs = ROUTINGS[routing]()
    case = Case(routing, pieces.mixtral().piece, _assignment(degree), inputs)
    table = _table(inputs, degree)

    def run(axis: Any) -> tuple[Deviation, list[list[int]]]:
        spy = _Spy(axis)
        return deviation(case, spy), spy.rows

    for rank, (found, rows) in enumerate(on_threads(degree, run)):
        assert max(found.outputs, found.gradients, found.states) < 1e-12
        there, back = table[rank].tolist(), table[:, rank].tolist()
        assert rows == [there, back] * 2  # forward and backward
    if routing == "crowded":
        assert table[:, -1].sum() == 0
    if routing == "even":
        assert table.sum(0).tolist() == [ROWS // degree] * degree


@pytest.mark.parametrize("degree", [2, 4])
def test_the_layout_says_what_is_sent_and_shares_all_work(degree: int) -> None:
    layout, rows = _layout(degree), LENGTH * TOP_K

    sent = [(c.kind, c.phase, c.floats(BATCH)) for c in layout.collectives]
    assert sent == [
        ("all_to_all", "forward", degree * EXPERTS),  # how many rows
        *[("all_to_all", "forward", ROWS * HIDDEN)] * 2,
        *[("all_to_all", "backward", ROWS * HIDDEN)] * 2,
        ("all_reduce", "backward", EXPERTS * HIDDEN),  # the gradient of the router
    ]
    grouped, router = 2.0 * rows * 3 * HIDDEN * FFN, 2.0 * LENGTH * HIDDEN * EXPERTS
    assert layout.work.flops(BATCH) == pytest.approx(BATCH * (grouped + router) / degree)
    assert layout.work.params == EXPERTS * 3 * FFN * HIDDEN // degree + EXPERTS * HIDDEN
    assert (layout.reads, layout.writes) == ((Shard(1),), (Shard(1),))


@pytest.mark.parametrize("degree", [2, 4])
def test_even_routing_sends_what_the_layout_says(degree: int) -> None:
    case = Case("even", pieces.mixtral().piece, _assignment(degree), _even())
    promised = [(c.kind, int(c.floats(BATCH))) for c in _layout(degree).collectives]

    for found in on_threads(degree, lambda axis: deviation(case, axis)):
        assert list(found.sent) == promised


@pytest.mark.parametrize("kind", ["plain", "argsort"])
def test_one_matmul_and_a_residual(kind: str) -> None:
    group = pieces.routed(kind)
    assignment = _solve(group, 2)
    assert assignment is not None

    case = Case(kind, group.piece, assignment, group.inputs)
    for found in on_threads(2, lambda axis: deviation(case, axis)):
        assert max(found.outputs, found.gradients) < 1e-12
        assert [kind for kind, _ in found.sent].count("all_to_all") == 5


@pytest.mark.parametrize("kind", sorted({*get_args(pieces.Kind)} - {"plain", "argsort"}))
def test_an_order_that_is_used_in_another_way_gives_no_layout(kind: str) -> None:
    assert _solve(pieces.routed(kind), 2) is None


def test_degrees_that_do_not_divide_experts_or_tokens_give_no_layout() -> None:
    group = pieces.mixtral()

    for degree in (3, 8):
        with pytest.raises(KeyError):
            group.border("expert-sequence", degree)


@pytest.mark.dist
def test_outputs_gradients_and_traffic_on_gloo_ranks() -> None:
    """One launch for the layout in which every device has all tokens as well (``expert``)."""
    group = pieces.mixtral()
    cases, layouts = [], []
    for degree in (2, 4):
        pins = expert_pins(group.piece, degree)
        whole = solve(group.piece, degree, group.grads, pins)
        assert whole is not None
        cases.append(Case(f"whole {degree}", group.piece, whole, group.inputs))
        layouts.append(_layout(degree, "expert"))
        for routing, make in ROUTINGS.items():
            cases.append(Case(f"{routing} {degree}", group.piece, _assignment(degree), make()))
            layouts.append(_layout(degree))

    reports = check_ranks(cases, 4)

    for case, layout in zip(cases, layouts, strict=True):
        found = reports[case.name]
        assert max(max(each.outputs, each.gradients) for each in found) < 1e-12, case.name
        promised = [(c.kind, int(c.floats(BATCH))) for c in layout.collectives]
        calls = zip(*(each.sent for each in found), strict=True)
        assert [sum(n for _, n in call) / len(call) for call in calls] == [n for _, n in promised]
        if case.name.startswith(("even", "whole")):
            assert all(list(each.sent) == promised for each in found), case.name
