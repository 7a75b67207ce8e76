"""Indexing, scatter and bags inside of models: what the search makes of them, and that it runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from rlplace.graph.layouts import solve
from rlplace.graph.program import Piece, export_program, extract
from rlplace.graph.sharding.index_rules import INDEX_SIGNATURES
from rlplace.graph.sharding.lower import Assignment
from rlplace.graph.sharding.nodes import op_name
from rlplace.graph.types import Partial, Shard
from rlplace.runtime.shard_check import Case, Deviation, deviation
from tests.graph.thread_axis import on_threads


def _piece(model: nn.Module, x: Tensor) -> tuple[Piece, list[Any]]:
    """All of a model as one piece, with its inputs."""
    program = export_program(model, (x,))
    piece = extract(program, [node.name for node in program.nodes], device="cpu")
    states = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    given = [
        states[name].detach().requires_grad_(states[name].requires_grad) for _, name in piece.states
    ]
    return piece, [*given, x.clone().requires_grad_(x.is_floating_point())]


def _solved(model: nn.Module, x: Tensor, degree: int) -> tuple[Piece, Assignment]:
    """The layout that the search finds, after it has been run and compared."""
    piece, inputs = _piece(model, x)
    places = [*(place for place, _ in piece.states), *piece.inputs]
    grads = [place for place, value in zip(places, inputs, strict=True) if value.requires_grad]
    assignment = solve(piece, degree, grads)
    assert assignment is not None
    case = Case("model", piece, assignment, inputs)
    reports: list[Deviation] = on_threads(degree, lambda axis: deviation(case, axis))
    for each in reports:
        assert each.outputs < 1e-12
        assert each.gradients < 1e-12
    return piece, assignment


def _strategies(piece: Piece, assignment: Assignment, op: str) -> list[Any]:
    nodes = [node for node in piece.module.graph.nodes if op_name(node) == op]
    return [assignment.strategy(node) for node in nodes]


class _Tables(nn.Module):
    """Tables of a recommendation model; the export keeps all four results of each bag."""

    def __init__(self, mode: str) -> None:
        super().__init__()
        bags = (nn.EmbeddingBag(64, 8, mode=mode, dtype=torch.float64) for _ in range(2))
        self.tables = nn.ModuleList(bags)

    def forward(self, ids: Tensor) -> Tensor:
        return torch.stack([table(ids[:, i]) for i, table in enumerate(self.tables)], 1)


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("degree", [2, 4])
def test_tables_are_cut_by_rows_or_by_features(mode: str, degree: int) -> None:
    ids = torch.randint(0, 64, (3, 2, 4), generator=torch.Generator().manual_seed(0))

    piece, assignment = _solved(_Tables(mode), ids, degree)

    assert all(isinstance(place, Shard) for place in assignment.states.values())
    outputs = [each.output for each in _strategies(piece, assignment, "embedding_bag")]
    assert len(outputs) == 2
    assert mode != "max" or Partial() not in outputs


class _Messages(nn.Module):
    """A layer on a graph as PyG runs it: gather at sources, weigh, scatter at targets."""

    edges: Tensor
    weights: Tensor

    def __init__(self, reduce: str) -> None:
        super().__init__()
        self.reduce = reduce
        self.first = nn.Linear(64, 64, bias=False, dtype=torch.float64)
        self.second = nn.Linear(64, 64, bias=False, dtype=torch.float64)
        draw = torch.Generator().manual_seed(0)
        self.register_buffer("edges", torch.randint(0, 6, (2, 12), generator=draw))
        self.register_buffer("weights", torch.rand(12, 1, dtype=torch.float64, generator=draw))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        messages = hidden.index_select(0, self.edges[0]) * self.weights
        index = self.edges[1].view(-1, 1).expand_as(messages)
        zeros = messages.new_zeros(x.shape[0], messages.shape[1])
        if self.reduce == "sum":
            total = zeros.scatter_add_(0, index, messages)
        else:
            total = zeros.scatter_reduce_(0, index, messages, self.reduce)
        out: Tensor = self.second(total.relu())
        return out


@pytest.mark.parametrize("reduce", ["sum", "amax", "mean"])
def test_messages_of_a_graph_keep_the_columns_of_a_linear_layer(reduce: str) -> None:
    x = torch.randn(6, 64, dtype=torch.float64)

    piece, assignment = _solved(_Messages(reduce), x, 2)

    scatter = "scatter_add_" if reduce == "sum" else "scatter_reduce_"
    for op in ("index_select", "new_zeros", scatter, "relu"):
        assert [each.output for each in _strategies(piece, assignment, op)] == [Shard(1)]
    first, second = _strategies(piece, assignment, "linear")
    assert (first.output, second.output) == (Shard(1), Partial())


class _Call(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(x)


def _node(function: Any, x: Tensor, op: str) -> fx.Node:
    program = export_program(_Call(function), (x,))
    found: list[fx.Node] = [node for node in program.nodes if op_name(node) == op]
    return found[0]


def test_a_bag_whose_other_results_are_used_runs_whole() -> None:
    def call(x: Tensor) -> Tensor:
        ids, offsets = torch.zeros(4, dtype=torch.long), torch.arange(2)
        bags = torch.ops.aten.embedding_bag(x, ids.to(x.device), offsets.to(x.device))
        out: Tensor = bags[0].sum() + bags[2].sum()
        return out

    node = _node(call, torch.randn(3, 8), "embedding_bag")

    assert INDEX_SIGNATURES["embedding_bag"](node) is None


def test_places_of_indices_side_by_side_and_apart() -> None:
    x, index = torch.randn(3, 4, 5, 6), torch.zeros(2, dtype=torch.long)

    def labels(function: Any) -> Any:
        signature = INDEX_SIGNATURES["index"](_node(function, x, "index"))
        assert signature is not None
        return signature.output

    assert labels(lambda t: t[:, index.to(t.device)]) == ("d0", None, "d2", "d3")
    beside = labels(lambda t: t[:, index.to(t.device), index.to(t.device)])
    assert beside == ("d0", None, "d3")
    apart = labels(lambda t: t[:, index.to(t.device), :, index.to(t.device)])
    assert apart == (None, "d0", "d2")


class _Block(nn.Module):
    """A block of a diffusion UNet: norms of groups of channels, convolutions, a skip."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(8, 32, dtype=torch.float64)
        self.wide = nn.Conv2d(32, 64, 3, padding=1, dtype=torch.float64)
        self.middle = nn.GroupNorm(8, 64, dtype=torch.float64)
        self.back = nn.ConvTranspose2d(64, 32, 2, 2, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.silu(self.middle(self.wide(F.silu(self.norm(x)))))
        out: Tensor = self.back(F.avg_pool2d(hidden, 2)) + F.interpolate(x, scale_factor=1)
        return out


@pytest.mark.parametrize("degree", [2, 4])
def test_a_block_of_convolutions_is_cut_by_groups_of_channels(degree: int) -> None:
    x = torch.randn(2, 32, 4, 4, dtype=torch.float64)

    piece, assignment = _solved(_Block(), x, degree)

    (wide,) = _strategies(piece, assignment, "conv2d")
    (back,) = _strategies(piece, assignment, "conv_transpose2d")
    assert (wide.output, back.output) == (Shard(1), Partial())
