from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from rlplace.graph.layouts import placements_of, solve
from rlplace.graph.program import Piece, Program, export_program, extract
from rlplace.graph.sharding.axis import use_axis
from rlplace.graph.sharding.lower import Assignment, lower, route
from rlplace.graph.sharding.nodes import (
    op_name,
    tensor_args,
)
from rlplace.graph.sharding.rules import (
    REPLICATE,
    Copied,
    Strategy,
)
from rlplace.graph.types import Partial, Placement, Replicate, Shard
from rlplace.runtime.shard import shard_parameter
from rlplace.runtime.shard_check import Case, Deviation, deviation
from tests.graph.thread_axis import on_threads


class _Call(nn.Module):
    """A function of the inputs and some parameters."""

    def __init__(self, function: Callable[..., Tensor], *params: Tensor) -> None:
        super().__init__()
        self.function = function
        self.weights = nn.ParameterList([nn.Parameter(param) for param in params])

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, *self.weights)


def _piece(model: nn.Module, x: Tensor) -> tuple[Program, Piece, list[Any]]:
    """All of a model as one piece, with its inputs; `x` requires a gradient where it can."""
    program = export_program(model, (x,))
    piece = extract(program, [node.name for node in program.nodes], device="cpu")
    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    given = [
        state[name].detach().requires_grad_(state[name].requires_grad) for _, name in piece.states
    ]
    x = x.clone().requires_grad_(x.is_floating_point())
    return program, piece, [*given, *[x for _ in piece.inputs]]


def _worst(case: Case) -> Deviation:
    """Run on threads, check that the devices sent the same, and give the largest errors."""
    found: list[Deviation] = on_threads(case.assignment.degree, lambda axis: deviation(case, axis))
    assert len({each.sent for each in found}) == 1
    return max(found, key=lambda each: max(each.outputs, each.gradients, each.states))


def _check(
    function: Callable[..., Tensor],
    x: Tensor,
    *params: Tensor,
    start: dict[str, Strategy],
    states: list[Placement],
    degree: int = 2,
) -> Deviation:
    """Run a function with the strategies of some of its ops given, the others replicated."""
    _, piece, inputs = _piece(_Call(function, *params), x)
    nodes = [node for node in piece.module.graph.nodes if op_name(node) in start]
    chosen = {node.name: start[op_name(node)] for node in nodes}
    places = dict(zip([place for place, _ in piece.states], states, strict=True))
    worst = _worst(Case("op", piece, Assignment(degree, chosen, places), inputs))
    assert worst.outputs < 1e-5
    assert worst.gradients < 1e-5
    return worst


X = torch.randn(3, 8, 16)
IMAGE = torch.randn(2, 8, 6, 6)


@pytest.mark.parametrize(
    ("base", "want", "steps"),
    [
        (Replicate(), Replicate(), ()),
        (Replicate(), Copied(), (Copied(),)),
        (Replicate(), Shard(1), (Shard(1),)),
        (Shard(1), Shard(1), ()),
        (Shard(1), Replicate(), (Replicate(),)),
        (Shard(1), Copied(), (Copied(),)),
        (Shard(1), Shard(2), (Shard(2),)),
        (Copied(), Copied(), ()),
        (Copied(), Replicate(), (Replicate(),)),
        (Copied(), Shard(1), (Shard(1),)),
        (Shard(1, 3), Shard(1), (Replicate(), Shard(1))),
    ],
)
def test_the_way_from_how_a_value_is_held_to_how_it_is_read(
    base: Placement | Copied, want: Any, steps: tuple[Any, ...]
) -> None:
    assert route(base, want) == steps


def test_columns_send_the_gradient_of_the_input_once() -> None:
    worst = _check(
        lambda x, w, b: F.linear(x, w, b),
        X,
        torch.randn(12, 16),
        torch.randn(12),
        start={"linear": Strategy((Copied(), Shard(0), Shard(0)), Shard(2))},
        states=[Shard(0), Shard(0)],
    )

    assert worst.sent == (("all_gather", 3 * 8 * 12), ("all_reduce", 3 * 8 * 16))


def test_rows_add_the_bias_after_the_sum() -> None:
    worst = _check(
        lambda x, w, b: F.linear(x, w, b),
        X,
        torch.randn(12, 16),
        torch.randn(12),
        start={"linear": Strategy((Shard(2), Shard(1), Replicate()), Partial())},
        states=[Shard(1), Replicate()],
    )

    assert worst.sent == (("all_reduce", 3 * 8 * 12), ("all_gather", 3 * 8 * 16))


@pytest.mark.parametrize("degree", [2, 4])
def test_convolution_by_out_channels_then_in_channels(degree: int) -> None:
    def twice(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        return F.conv2d(F.conv2d(x, a, padding=1).relu(), b)

    params = torch.randn(32, 8, 3, 3), torch.randn(8, 32, 1, 1)
    _, piece, inputs = _piece(_Call(twice, *params), IMAGE)
    assignment = solve(piece, degree, [*(place for place, _ in piece.states), *piece.inputs])

    assert assignment is not None
    assert list(placements_of(piece, assignment).values()) == [Shard(0), Shard(1)]
    worst = _worst(Case("conv", piece, assignment, inputs))
    assert max(worst.outputs, worst.gradients) < 1e-5


def test_the_bias_of_a_row_sharded_convolution() -> None:
    _check(
        lambda x, w, b: F.conv2d(x, w, b),
        IMAGE,
        torch.randn(4, 8, 3, 3),
        torch.randn(4),
        start={"conv2d": Strategy((Shard(1), Shard(1), Replicate()), Partial())},
        states=[Shard(1), Replicate()],
    )


def test_a_grouped_convolution_counts_its_own_groups() -> None:
    _check(
        lambda x, w: F.conv2d(x, w, None, 1, 0, 1, 4),
        IMAGE,
        torch.randn(12, 2, 3, 3),
        start={"conv2d": Strategy((Shard(1), Shard(0)), Shard(1))},
        states=[Shard(0)],
    )


@pytest.mark.parametrize("padding", [None, 3, 7])
def test_rows_of_an_embedding_and_its_padding(padding: int | None) -> None:
    ids = torch.tensor([[0, 3, 7], [7, 5, 3]])
    worst = _check(
        lambda x, w: F.embedding(x, w, padding),
        ids,
        torch.randn(8, 4),
        start={"embedding": Strategy((Shard(0), Replicate()), Partial())},
        states=[Shard(0)],
    )

    assert worst.sent == (("all_reduce", 2 * 3 * 4),)


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("degree", [2, 4])
def test_cross_entropy_over_sharded_classes(reduction: str, degree: int) -> None:
    labels = torch.tensor([0, -100, 11, 5])

    def loss(x: Tensor, table: Tensor) -> Tensor:
        logits = F.embedding(x.clamp(min=0), table)
        return F.cross_entropy(logits * 30.0, x, reduction=reduction)

    worst = _check(
        loss,
        labels,
        torch.randn(12, 12),
        start={
            "embedding": Strategy((Shard(1), Copied()), Shard(1)),
            "cross_entropy_loss": Strategy((Shard(1), Replicate()), Replicate()),
            "mul": Strategy((Shard(1),), Shard(1)),
        },
        states=[Shard(1)],
        degree=degree,
    )

    assert worst.sent == (("all_reduce", 4), ("all_reduce", 8))


def test_one_copy_serves_all_readers() -> None:
    def readers(x: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        hidden = x * 2.0
        return F.linear(F.linear(hidden, a) * F.linear(hidden, b), c)

    params = torch.randn(12, 16), torch.randn(12, 16), torch.randn(16, 12)
    _, piece, inputs = _piece(_Call(readers, *params), X)
    assignment = solve(piece, 2, [*(place for place, _ in piece.states), *piece.inputs])

    assert assignment is not None
    worst = _worst(Case("readers", piece, assignment, inputs))
    assert worst.sent == (("all_reduce", X.numel()), ("all_reduce", X.numel()))


def test_what_a_node_writes_into_is_not_read_from_before() -> None:
    """An in-place op between two readers of the same value: the second sees what it wrote."""

    def write(x: Tensor, a: Tensor) -> Tensor:
        hidden = x * 2.0
        first = F.linear(hidden, a)
        hidden.add_(1.0)
        return first + F.linear(hidden, a)

    program = export_program(_Call(write, torch.randn(16, 16)), (X,))
    piece = extract(program, [node.name for node in program.nodes], device="cpu")
    columns = Strategy((Copied(), Shard(0)), Shard(2))
    added = Strategy((Shard(2), Shard(2)), Shard(2))
    names = [n for n in piece.module.graph.nodes if op_name(n) in ("linear", "add")]
    chosen = {n.name: columns if op_name(n) == "linear" else added for n in names}
    assignment = Assignment(2, chosen, {piece.states[0][0]: Shard(0)})
    weight = torch.randn(16, 16)

    local = lower(piece, assignment)
    expected = piece.module(weight, X)[0]

    def run(axis: Any) -> Tensor:
        with use_axis(axis):
            out: Tensor = local(shard_parameter(weight, Shard(0), axis.rank, 2), X)[0]
        return out

    for out in on_threads(2, run):
        assert torch.allclose(out, expected, rtol=1e-5, atol=1e-5)


def test_a_sharded_dropout_draws_other_masks_and_a_replicated_one_the_same() -> None:
    model = _Call(lambda x: F.dropout(F.dropout(x, 0.5), 0.5))
    model.train()
    _, piece, _ = _piece(model, torch.ones(2, 64))
    first, second = (n for n in piece.module.graph.nodes if op_name(n) == "dropout")
    assignment = Assignment(2, {first.name: Strategy((Shard(1),), Shard(1))})
    local = lower(piece, assignment)
    torch.manual_seed(3)
    state = torch.get_rng_state()
    seen = []
    for rank in range(2):  # one device after the other: threads share a generator
        torch.set_rng_state(state)
        with use_axis(_Alone(rank)):
            seen.append(local(torch.ones(2, 64))[0])

    masks = [out != 0 for out in seen]
    assert second.name not in assignment.strategies
    assert 0.1 < (masks[0] != masks[1]).float().mean() < 0.5
    torch.set_rng_state(state)
    with use_axis(_Alone(1)):
        assert torch.equal(local(torch.ones(2, 64))[0], seen[1])  # as recompute does


class _Alone:
    """A device of an axis of two whose neighbour has the same shards."""

    size = 2

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def all_reduce(self, tensor: Tensor, op: str = "sum") -> Tensor:
        return tensor * 2 if op == "sum" else tensor

    def all_gather(self, tensor: Tensor, dim: int) -> Tensor:
        return torch.cat([tensor, tensor], dim)

    def reduce_scatter(self, tensor: Tensor, dim: int) -> Tensor:
        return self.all_reduce(tensor).chunk(2, dim)[self.rank]

    def all_to_all(self, tensor: Tensor, dim: int, joined: int) -> Tensor:
        return self.all_gather(tensor.chunk(2, dim)[self.rank], joined)

    def all_to_all_rows(self, tensor: Tensor, sent: Sequence[int], got: Sequence[int]) -> Tensor:
        return torch.cat([torch.split(tensor, list(sent))[self.rank]] * 2)


_STEPS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "gelu": lambda x, w, v: F.gelu(x),
    "scale": lambda x, w, v: x * v,
    "residual": lambda x, w, v: x + x.tanh(),
    "linear": lambda x, w, v: F.linear(x, w),
    "rows": lambda x, w, v: F.linear(x, w, v),
    "addmm": lambda x, w, v: torch.addmm(v, x.reshape(-1, 16), w).view(-1, 4, 16),
    "heads": lambda x, w, v: (
        x.view(-1, 4, 2, 8).transpose(1, 2).tanh().transpose(1, 2).reshape(-1, 4, 16)
    ),
    "fused": lambda x, w, v: torch.cat([part.sin() for part in torch.split(x, 8, -1)], -1),
    "gate": lambda x, w, v: torch.cat([x.chunk(2, -1)[0] * x.chunk(2, -1)[1]] * 2, -1),
    "norm": lambda x, w, v: F.layer_norm(x, (16,), v),
    "softmax": lambda x, w, v: x.view(-1, 4, 4, 4).softmax(-1).flatten(2),
    "attend": lambda x, w, v: _attend(x),
    "slice": lambda x, w, v: torch.cat([x[..., 4:], x[..., :4]], -1),
    "mean": lambda x, w, v: x + x.mean(1, keepdim=True),  # a difference would cancel out
    "sum": lambda x, w, v: x + x.sum(-1, keepdim=True),
}


def _attend(x: Tensor) -> Tensor:
    heads = x.view(-1, 4, 4, 4).transpose(1, 2)
    keys = heads[:, :2].unsqueeze(2).expand(-1, 2, 2, 4, 4).reshape(-1, 4, 4, 4)
    return F.scaled_dot_product_attention(heads, keys, keys).transpose(1, 2).flatten(2)


@settings(deadline=None, max_examples=25)
@given(
    steps=st.lists(st.sampled_from(sorted(_STEPS)), min_size=2, max_size=6),
    degree=st.sampled_from([2, 4]),
    seed=st.integers(0, 2**16),
)
def test_random_chains_equal_the_whole(steps: list[str], degree: int, seed: int) -> None:
    torch.manual_seed(seed)
    wide = torch.float64  # in fp32 a gradient that cancels out is mostly rounding
    params = [torch.randn(16, 16, dtype=wide) / 4, torch.randn(16, dtype=wide)] * len(steps)

    def chain(x: Tensor, *weights: Tensor) -> Tensor:
        for i, step in enumerate(steps):
            x = _STEPS[step](x, weights[2 * i], weights[2 * i + 1])
        return x

    _, piece, inputs = _piece(_Call(chain, *params), torch.randn(3, 4, 16, dtype=wide))
    assignment = solve(piece, degree, [*(place for place, _ in piece.states), *piece.inputs])
    if assignment is not None:
        worst = _worst(Case("chain", piece, assignment, inputs))
        assert worst.outputs < 1e-12
        assert worst.gradients < 1e-12


def test_a_node_that_is_not_named_runs_replicated() -> None:
    _, piece, inputs = _piece(_Call(F.linear, torch.randn(12, 16)), X)
    node = next(n for n in piece.module.graph.nodes if op_name(n) == "linear")

    strategy = Assignment(2).strategy(node)

    assert strategy == Strategy((REPLICATE,) * len(tensor_args(node)), REPLICATE)
    assert _worst(Case("whole", piece, Assignment(2), inputs)).sent == ()
