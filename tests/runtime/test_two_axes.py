from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rlplace.errors import InputError
from rlplace.graph.program import Piece, export_program, extract
from rlplace.graph.sharding.lower import Assignment
from rlplace.graph.sharding.strategy import Copied, Strategy
from rlplace.graph.types import Replicate, Shard
from rlplace.runtime.moves import Held, moves
from rlplace.runtime.two_axes import fewer_heads, heads_left, lower_both

WHOLE, SEQUENCE = Replicate(), Shard(1)
HEADS, ROWS = Shard(1), Shard(2)


def test_tp_cuts_what_cp_leaves() -> None:
    path = moves(Held(), SEQUENCE, SEQUENCE)
    assert path == [("cp", SEQUENCE), ("tp", SEQUENCE)]
    both = Held(SEQUENCE, SEQUENCE)
    assert moves(both, SEQUENCE, Copied()) == [("tp", Copied())]
    assert moves(both, WHOLE, WHOLE) == [("tp", WHOLE), ("cp", WHOLE)]
    # cp was first: tp lets go, and cuts again what cp then has.
    assert moves(both, WHOLE, SEQUENCE) == [("tp", WHOLE), ("cp", WHOLE), ("tp", SEQUENCE)]


def test_cp_exchanges_rows_for_heads_that_tp_has_cut() -> None:
    held = Held(ROWS, HEADS)
    assert moves(held, HEADS, HEADS) == [("cp", HEADS)]
    inside = held.moved("cp", HEADS)
    assert inside == Held(HEADS, HEADS, outer="tp")
    assert inside.moved("tp", WHOLE) is None, "cp has cut what tp would gather"
    assert moves(inside, ROWS, HEADS) == [("cp", ROWS)]


def test_a_bias_of_heads_is_cut_as_the_queries_are() -> None:
    bias = Held(tp=HEADS)
    assert moves(bias, HEADS, HEADS) == [("tp", WHOLE), ("cp", HEADS), ("tp", HEADS)]
    assert moves(bias, HEADS, HEADS, outer="tp") == [("cp", HEADS)]
    assert moves(Held(), HEADS, HEADS, outer="tp") == [("tp", HEADS), ("cp", HEADS)]


def test_fused_runs_are_not_cut_twice() -> None:
    with pytest.raises(InputError, match="cp and tp cannot both cut"):
        moves(Held(cp=Shard(2)), Shard(2), Shard(2, blocks=3))


class Attention(nn.Module):
    """Keys and values of fewer heads than queries."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = k * self.scale, v * self.scale
        out = F.scaled_dot_product_attention(q * self.scale, k, v, enable_gqa=True)
        return out.mean()


def attention() -> tuple[Piece, str]:
    example = {"q": torch.zeros(2, 4, 6, 8), "k": torch.zeros(2, 2, 6, 8)}
    program = export_program(Attention(), (), {**example, "v": example["k"].clone()})
    names = [node.name for node in program.nodes]
    (kernel,) = (name for name in names if name.startswith("scaled_dot"))
    return extract(program, names), kernel


def by_heads(kernel: str) -> Assignment:
    return Assignment(2, {kernel: Strategy((HEADS, HEADS, HEADS), HEADS)})


def test_cp_takes_only_the_heads_that_tp_leaves() -> None:
    piece, kernel = attention()
    assert not heads_left(piece, by_heads(kernel), by_heads(kernel)), "one head of keys is left"
    whole = [node.meta["val"] for node in piece.module.graph.nodes if node.op != "output"]
    (node,) = (node for node in piece.module.graph.nodes if node.name == kernel)
    with fewer_heads(piece, by_heads(kernel)):
        assert [arg.meta["val"].shape[1] for arg in node.all_input_nodes] == [2, 1, 1]
    after = [node.meta["val"] for node in piece.module.graph.nodes if node.op != "output"]
    assert all(one is other for one, other in zip(whole, after, strict=True))
    by_rows = Strategy((ROWS, Copied(), Copied()), ROWS)
    assert heads_left(piece, Assignment(2, {kernel: by_rows}), by_heads(kernel))


def test_each_axis_has_its_own_conversions() -> None:
    piece, kernel = attention()
    by_rows = Assignment(2, {kernel: Strategy((ROWS, Copied(), Copied()), ROWS)})
    lowered = lower_both(piece, by_rows, by_heads(kernel))
    called = [getattr(node.target, "__name__", "") for node in lowered.graph.nodes]
    assert called.count("split_over_cp") == 1, "queries by rows"
    assert called.count("copy_over_cp") == 2, "keys and values whole"
    assert called.count("split") == 3, "heads of all of them"
    assert (called.count("gather_over_cp"), called.count("gather")) == (1, 1)
