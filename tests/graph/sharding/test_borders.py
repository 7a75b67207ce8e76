from __future__ import annotations

from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rlplace.graph.layouts import placements_of, solve
from rlplace.graph.program import Piece, export_program, extract
from rlplace.graph.sharding.borders import Border, cut_border, free_border
from rlplace.graph.types import Replicate, Shard
from rlplace.runtime.shard_check import Case, Deviation, deviation
from tests.graph.thread_axis import on_threads

LENGTH, WIDTH = 8, 16


class _Attention(nn.Module):
    """A norm, causal attention whose keys may be grouped, and a residual."""

    def __init__(self, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.heads, self.kv_heads, size = heads, kv_heads, WIDTH // heads
        self.norm = nn.LayerNorm(WIDTH)
        self.queries = nn.Linear(WIDTH, WIDTH)
        self.keys = nn.Linear(WIDTH, kv_heads * size)
        self.values = nn.Linear(WIDTH, kv_heads * size)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(x)
        query = self.queries(hidden).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        key, value = (
            project(hidden).unflatten(-1, (self.kv_heads, -1)).transpose(1, 2)
            for project in (self.keys, self.values)
        )
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        projected: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return x + projected


class _Rows(nn.Module):
    """A table of positions, a linear over the rows of all samples, and the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Parameter(torch.randn(1, LENGTH, WIDTH))
        self.scale = nn.Parameter(torch.randn(WIDTH))
        self.head = nn.Linear(WIDTH, 12)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        rows = ((x + self.positions) * self.scale).view(-1, WIDTH)
        return F.cross_entropy(self.head(rows), labels.view(-1))


class _Biased(nn.Module):
    """Scores of attention with a bias of each head that another group makes."""

    def __init__(self) -> None:
        super().__init__()
        self.queries, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        query = self.queries(x).view(-1, LENGTH, 4, 4).transpose(1, 2)
        mixed = F.scaled_dot_product_attention(query, query, query, bias)
        projected: Tensor = self.out(mixed.transpose(1, 2).reshape(-1, LENGTH, WIDTH))
        return x + projected


def _case(module: nn.Module, *inputs: Tensor) -> tuple[Piece, list[Any], list[str]]:
    """A module as one piece, whose inputs are activations that other groups make."""
    module = module.double()
    program = export_program(module, inputs)
    piece = extract(program, [node.name for node in program.nodes], device="cpu")
    states = dict(module.named_parameters())
    given = {name: x.requires_grad_(x.is_floating_point()) for name, x in _named(piece, inputs)}
    values = [states[name].detach().requires_grad_() for _, name in piece.states]
    return piece, [*values, *given.values()], list(given)


def _named(piece: Piece, inputs: tuple[Tensor, ...]) -> list[tuple[str, Tensor]]:
    return list(zip(piece.inputs, inputs, strict=True))


def _hidden() -> Tensor:
    return torch.randn(3, LENGTH, WIDTH, dtype=torch.float64)


def _run(
    case: tuple[Piece, list[Any], list[str]], border: Border | None, degree: int
) -> tuple[Any, Deviation]:
    piece, inputs, activations = case
    assert border is not None
    grads = [*(place for place, _ in piece.states), *activations]
    assignment = solve(piece, degree, grads, None, border)
    assert assignment is not None
    found: list[Deviation] = on_threads(
        degree, lambda axis: deviation(Case("", piece, assignment, inputs), axis)
    )
    assert len({each.sent for each in found}) == 1
    assert max(max(each.outputs, each.gradients) for each in found) < 1e-12
    return assignment, found[0]


@pytest.mark.parametrize("degree", [2, 4])
def test_sequence_parallelism_is_a_gather_and_a_scatter_each_way(degree: int) -> None:
    case = _case(_Attention(4, 4), _hidden())
    assignment, found = _run(case, cut_border(case[0], case[2], degree, "tp"), degree)

    big = [(kind, floats) for kind, floats in found.sent if floats > 3 * WIDTH]
    whole = 3 * LENGTH * WIDTH
    forward = [("all_gather", whole), ("reduce_scatter", whole)]
    assert big == forward * 2
    small = [(kind, floats) for kind, floats in found.sent if floats <= 3 * WIDTH]
    assert small == [("all_reduce", WIDTH)] * 3  # two of the norm, the bias after the sum
    held = placements_of(case[0], assignment)
    assert (held["keys.weight"], held["out.weight"]) == (Shard(0), Shard(1))
    assert held["norm.weight"] == Replicate()


@pytest.mark.parametrize(
    ("heads", "kv_heads", "degree", "way"),
    [
        (4, 4, 2, "all_to_all"),  # between the heads
        (4, 4, 4, "all_to_all"),
        (2, 2, 4, "all_gather"),  # heads do not divide
        (4, 1, 2, "all_gather"),
    ],
)
def test_context_parallel_attention_goes_between_heads_or_gathers_keys(
    heads: int, kv_heads: int, degree: int, way: str
) -> None:
    case = _case(_Attention(heads, kv_heads), _hidden())
    assignment, found = _run(case, cut_border(case[0], case[2], degree, "cp"), degree)

    kinds = [kind for kind, _ in found.sent]
    back = "all_to_all" if way == "all_to_all" else "reduce_scatter"
    count = 4 if way == "all_to_all" else 2
    assert kinds == [way] * count + [back] * count
    assert set(placements_of(case[0], assignment).values()) == {Replicate()}
    assert len(assignment.summands) == len(case[0].states)


@pytest.mark.parametrize("axis", ["tp", "cp"])
@pytest.mark.parametrize("degree", [2, 4])
def test_rows_of_all_samples_carry_the_cut_of_their_sequences(
    axis: Literal["tp", "cp"], degree: int
) -> None:
    labels = torch.randint(0, 12, (3, LENGTH))
    labels[0, :3] = -100
    case = _case(_Rows(), _hidden(), labels)
    assignment, found = _run(case, cut_border(case[0], case[2], degree, axis), degree)

    views = [s.held for name, s in assignment.strategies.items() if name.startswith("view")]
    assert Shard(0, run=LENGTH) in views
    if axis == "cp":  # the sum of the losses and how many they are
        assert found.sent == (("all_reduce", 2),)
    else:  # the head is cut: the rows are sent in one way or another
        assert {kind for kind, _ in found.sent} & {"all_gather", "all_to_all"}


def test_a_bias_of_each_head_may_stay_cut_between_groups() -> None:
    bias = torch.randn(1, 4, LENGTH, LENGTH, dtype=torch.float64).expand(3, -1, -1, -1)
    case = _case(_Biased(), _hidden(), bias.contiguous())
    whole, found = _run(case, Border(), 2)
    through, less = _run(case, free_border(case[0], case[2]), 2)

    both_ways = ("all_reduce", 3 * LENGTH * WIDTH)
    assert found.sent.count(both_ways) == less.sent.count(both_ways) == 2
    assert (len(found.sent), len(less.sent)) == (3, 2)  # the gradient of the bias is not gathered
    assert list(through.reads.values()) == [Shard(1)]
    assert not whole.reads


def test_borders_that_do_not_divide_are_none() -> None:
    case = _case(_Attention(4, 4), _hidden())

    assert cut_border(case[0], case[2], 3, "tp") is None
    assert free_border(case[0], case[2]) is None
    assert cut_border(case[0], case[2], 8, "cp") is not None
