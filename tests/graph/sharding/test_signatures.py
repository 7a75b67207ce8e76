"""Every strategy of every op with a rule, run on two and four devices and compared with the op."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from rlplace.graph.program import Piece, Program, export_program, extract
from rlplace.graph.sharding.lower import Assignment
from rlplace.graph.sharding.nodes import op_name, shape, tensor_args
from rlplace.graph.sharding.rules import strategies
from rlplace.graph.sharding.signatures import ELEMENTWISE
from rlplace.graph.sharding.strategy import Strategy, divides
from rlplace.graph.types import Shard
from rlplace.runtime.shard_check import Case, Deviation, deviation
from tests.graph import op_cases as table
from tests.graph.thread_axis import on_threads

#: `Shard.blocks` to try, by degree.
BLOCKS = {2: (1, 2), 4: (1,)}


@cache
def _program() -> tuple[Program, torch.nn.Module, Tensor]:
    """All ops of the table, exported as one model."""
    model = table.Cases(table.CASES)
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(table.BATCH, table.ROW, dtype=torch.float64, generator=draw)
    return export_program(model, (x,)), model, x


def _piece(index: int) -> tuple[Piece, list[Any]]:
    """The nodes that one case's result depends on, as a piece, with its inputs."""
    program, model, x = _program()
    by_name = {node.name: node for node in program.exported.graph.nodes}
    output = by_name[program.outputs[index]]
    names: set[str] = set()
    stack = [output]
    while stack:
        node = stack.pop()
        if node.name not in names:
            names.add(node.name)
            stack += node.all_input_nodes
    nodes = [node.name for node in program.nodes if node.name in names]
    piece = extract(program, nodes, writes=[output.name], device="cpu")
    states = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    given: list[Any] = [
        states[name].detach().clone().requires_grad_(states[name].requires_grad)
        for _, name in piece.states
    ]
    return piece, [*given, *(x.clone().requires_grad_() for _ in piece.inputs)]


def _target(piece: Piece, op: str) -> fx.Node:
    found: list[fx.Node] = [n for n in piece.module.graph.nodes if op_name(n) == op]
    assert found, f"{op} is not in {[op_name(node) for node in piece.module.graph.nodes]}"
    return found[-1]


def _sharded(node: fx.Node, degree: int) -> list[Strategy]:
    """All strategies but the replicated one, whatever way the arguments can be held in."""
    reachable = {
        arg: [
            Shard(dim, blocks)
            for dim, size in enumerate(shape(arg))
            for blocks in BLOCKS[degree]
            if divides(size, degree, blocks)
        ]
        for arg in tensor_args(node)
    }
    return [each for each in strategies(node, degree, reachable, BLOCKS[degree]) if each.sharded]


def _assignment(node: fx.Node, strategy: Strategy, degree: int) -> Assignment:
    """One node sharded, with the parts of it that are read; the rest is replicated."""
    chosen = {node.name: strategy}
    if isinstance(strategy.output, Shard):
        for user in node.users:
            if op_name(user) == "getitem":
                chosen[user.name] = Strategy((strategy.output,), strategy.output)
    return Assignment(degree, chosen)


def _worst(case: Case) -> Deviation:
    found: list[Deviation] = on_threads(case.assignment.degree, lambda axis: deviation(case, axis))
    assert len({each.sent for each in found}) == 1
    return max(found, key=lambda each: max(each.outputs, each.gradients, each.states))


def _checked(index: int, degree: int) -> Iterator[tuple[Strategy, Deviation]]:
    piece, inputs = _piece(index)
    node = _target(piece, table.CASES[index].op)
    for strategy in _sharded(node, degree):
        assignment = _assignment(node, strategy, degree)
        yield strategy, _worst(Case("op", piece, assignment, inputs))


@pytest.mark.parametrize("index", range(len(table.CASES)), ids=[c.title for c in table.CASES])
def test_every_strategy_of_an_op_gives_what_the_op_gives(index: int) -> None:
    counts = []
    for degree in (2, 4):
        checked = list(_checked(index, degree))
        for strategy, worst in checked:
            assert worst.outputs < 1e-12, strategy
            assert worst.gradients < 1e-12, strategy
            assert worst.states < 1e-12, strategy
        counts.append(len(checked))

    assert counts[0] >= table.CASES[index].least
    assert (counts[1] > 0) == (table.CASES[index].least > 0)


_PAIRS = """
    add atan2 copysign div divide greater_equal less_equal eq float_power fmax fmin fmod ge
    greater gt hypot le less logaddexp logaddexp2 logical_and logical_or logical_xor lt maximum
    minimum mul multiply ne not_equal pow remainder rsub sub subtract true_divide xlogy
    heaviside floor_divide bitwise_and bitwise_or bitwise_xor __and__ __or__ __xor__
""".split()
_OTHERS = {
    "addcdiv": lambda x: torch.addcdiv(x, x, x + 2.0),
    "addcmul": lambda x: torch.addcmul(x, x, x),
    "clamp": lambda x: x.clamp(0.2, 0.8),
    "clamp_max": lambda x: x.clamp_max(0.5),
    "clamp_min": lambda x: x.clamp_min(0.5),
    "clip": lambda x: x.clip(0.2, 0.8),
    "dropout": lambda x: torch.dropout(x, 0.0, True),
    "full_like": lambda x: torch.full_like(x, 3.0),
    "lerp": lambda x: torch.lerp(x, x * x, 0.3),
    "masked_fill": lambda x: x.masked_fill(x > 0.5, 0.0),
    "threshold": lambda x: torch.threshold(x, 0.5, 0.0),
    "to": lambda x: x.to(torch.float32),
    "type_as": lambda x: x.type_as(x.float()),
    "where": lambda x: torch.where(x > 0.5, x, -x),
    "_to_copy": lambda x: torch.ops.aten._to_copy(x, dtype=torch.float32),
}
_BITS = ("bitwise_and", "bitwise_not", "bitwise_or", "bitwise_xor", "__and__", "__or__", "__xor__")
#: Broadcast with their arguments; among the cases of the table.
_BROADCASTS = ("expand", "expand_as")


@pytest.mark.parametrize("op", sorted(set(ELEMENTWISE) - set(_BROADCASTS)))
def test_an_elementwise_op_works_on_each_element_alone(op: str) -> None:
    """So that any part of its arguments gives the same part of its result, and of its gradient."""
    function: Any = getattr(torch.ops.aten, op)
    if op in _PAIRS:
        function = partial(_of_two, function)
    function = _OTHERS.get(op, function)
    draw = torch.Generator().manual_seed(2)
    x = 0.1 + 0.8 * torch.rand(2, 8, dtype=torch.float64, generator=draw)
    x = x + 1.0 if op == "acosh" else x
    x = (x * 8).long() if op in _BITS else x.requires_grad_()

    for whole, part in zip(function(x).chunk(4, 1), x.chunk(4, 1), strict=True):
        own = function(part)
        assert torch.allclose(whole, own, rtol=1e-13)
        if own.grad_fn is not None and op not in ("heaviside", "floor_divide"):
            (grads,) = torch.autograd.grad(own.sum(), x, retain_graph=True, allow_unused=True)
            (expected,) = torch.autograd.grad(whole.sum(), x, retain_graph=True, allow_unused=True)
            assert (grads is None) == (expected is None)
            assert grads is None or torch.allclose(grads, expected, rtol=1e-13)


def _of_two(function: Any, x: Tensor) -> Any:
    return function(x, x.flip(0))
