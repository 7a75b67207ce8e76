from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, fx, nn
from torch.nn import functional as F

from rlplace.graph.program import export_program
from rlplace.graph.sharding.nodes import (
    op_name,
    tensor_args,
    written_args,
)
from rlplace.graph.sharding.rules import (
    REPLICATE,
    Copied,
    Strategy,
    reshaped,
    strategies,
)
from rlplace.graph.sharding.shards import cut
from rlplace.graph.types import Partial, Replicate, Shard

COPIED, PARTIAL = Copied(), Partial()


class _Call(nn.Module):
    """One function of the inputs and some parameters."""

    def __init__(self, function: Callable[..., Tensor], *params: Tensor) -> None:
        super().__init__()
        self.function = function
        self.weights = nn.ParameterList([nn.Parameter(param) for param in params])

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, *self.weights)


def _node(name: str, function: Callable[..., Any], x: Tensor, *params: Tensor) -> fx.Node:
    """The node of an op in the exported program of a function of a batch."""
    program = export_program(_Call(function, *params), (x,))
    return next(node for node in program.nodes if op_name(node) == name)


def _sharded(node: fx.Node, *held: Shard | None, degree: int = 2) -> list[Strategy]:
    """Strategies of a node but the replicated one, when its arguments are held in this way."""
    args = zip(tensor_args(node), held, strict=False)
    reachable = {arg: [shard] for arg, shard in args if shard is not None}
    found = strategies(node, degree, reachable)
    assert found[0] == Strategy((REPLICATE,) * len(tensor_args(node)), REPLICATE)
    return found[1:]


X = torch.randn(3, 8, 16)


def test_linear_is_cut_by_columns_or_by_rows() -> None:
    node = _node("linear", F.linear, X, torch.randn(12, 16), torch.randn(12))

    columns = Strategy((COPIED, Shard(0), Shard(0)), Shard(2))
    rows = Strategy((Shard(2), Shard(1), Replicate()), PARTIAL)
    assert _sharded(node) == [columns, rows]


def test_linear_follows_a_sharding_of_the_rows_of_its_input() -> None:
    node = _node("linear", F.linear, X, torch.randn(12, 16))

    assert Strategy((Shard(1), COPIED), Shard(1)) in _sharded(node, Shard(1))


def test_a_length_that_the_degree_does_not_divide_stays_whole() -> None:
    node = _node("linear", F.linear, X, torch.randn(10, 16))

    assert _sharded(node, degree=4) == [Strategy((Shard(2), Shard(1)), PARTIAL)]


def test_the_batch_is_never_cut() -> None:
    node = _node("relu", F.relu, X)

    assert _sharded(node, Shard(0)) == []


def test_elementwise_follows_and_broadcasts() -> None:
    node = _node("mul", torch.mul, X, torch.randn(16))

    assert _sharded(node) == []
    assert _sharded(node, Shard(2)) == [Strategy((Shard(2), Shard(0)), Shard(2))]
    assert _sharded(node, Shard(1)) == [Strategy((Shard(1), COPIED), Shard(1))]


def test_a_fused_projection_becomes_its_parts() -> None:
    node = _node("split", lambda x: x.split(4, -1)[1], torch.randn(3, 8, 12))

    assert _sharded(node, Shard(2)) == []
    assert _sharded(node, Shard(2, blocks=3)) == [Strategy((Shard(2, 3),), Shard(2))]
    assert _sharded(node, Shard(1)) == [Strategy((Shard(1),), Shard(1))]


def test_heads_of_attention_with_a_mask_and_grouped_keys() -> None:
    def attend(x: Tensor, keys: Tensor, mask: Tensor) -> Tensor:
        q = x.reshape(x.shape[0], 4, 8, 4)
        k = keys.expand(x.shape[0], 2, 8, 4)
        return F.scaled_dot_product_attention(q, k, k, mask, enable_gqa=True)

    keys, mask = torch.randn(1, 2, 8, 4), torch.randn(1, 1, 8, 8)
    node = _node("scaled_dot_product_attention", attend, X, keys, mask)

    heads = Strategy((Shard(1), Shard(1), Shard(1), COPIED), Shard(1))
    assert _sharded(node, Shard(1)) == [heads]
    assert _sharded(node, Shard(1), degree=4) == []  # 2 heads of keys
    rows = Strategy((Shard(2), COPIED, COPIED, Shard(2)), Shard(2))
    assert _sharded(node, Shard(2)) == [rows, heads]
    assert _sharded(node, Shard(2), degree=4) == [rows]
    assert _sharded(node, Shard(3)) == []


def test_a_bias_of_each_head_is_cut_with_the_heads() -> None:
    def attend(x: Tensor, bias: Tensor) -> Tensor:
        q = x.reshape(x.shape[0], 4, 8, 4)
        return F.scaled_dot_product_attention(q, q, q, bias)

    node = _node("scaled_dot_product_attention", attend, X, torch.randn(1, 4, 8, 8))

    assert _sharded(node, Shard(1)) == [Strategy((Shard(1),) * 4, Shard(1))]


def test_embedding_is_cut_by_features_or_by_rows() -> None:
    ids = torch.zeros(3, 8, dtype=torch.long)
    node = _node("embedding", F.embedding, ids, torch.randn(10, 16))

    assert _sharded(node) == [
        Strategy((Shard(0), Replicate()), PARTIAL),
        Strategy((Shard(1), COPIED), Shard(2)),
    ]


def test_convolution_is_cut_by_channels() -> None:
    image = torch.randn(2, 8, 5, 5)
    node = _node("conv2d", F.conv2d, image, torch.randn(4, 8, 3, 3), torch.randn(4))

    out = Strategy((COPIED, Shard(0), Shard(0)), Shard(1))
    into = Strategy((Shard(1), Shard(1), Replicate()), PARTIAL)
    assert _sharded(node) == [out, into]
    assert _sharded(node, Shard(2)) == [out, into]  # never by height


def test_grouped_convolution_is_cut_by_groups() -> None:
    def depthwise(x: Tensor, weight: Tensor) -> Tensor:
        return F.conv2d(x, weight, None, 1, 0, 1, 8)

    node = _node("conv2d", depthwise, torch.randn(2, 8, 5, 5), torch.randn(8, 1, 3, 3))

    assert _sharded(node, Shard(1)) == [Strategy((Shard(1), Shard(0)), Shard(1))]
    assert _sharded(node) == []


@pytest.mark.parametrize("groups", [3, 4])
def test_channels_are_cut_only_between_groups(groups: int) -> None:
    def convolve(x: Tensor, weight: Tensor) -> Tensor:
        return F.conv2d(x, weight, None, 1, 0, 1, groups)

    node = _node("conv2d", convolve, torch.randn(2, 12, 5, 5), torch.randn(12, 12 // groups, 3, 3))

    assert bool(_sharded(node, Shard(1))) == (groups == 4)


def test_normalized_and_reduced_dims_stay_whole() -> None:
    norm = _node("layer_norm", lambda x, w: F.layer_norm(x, (16,), w), X, torch.randn(16))
    soft = _node("softmax", lambda x: x.softmax(-1), X)
    mean = _node("mean", lambda x: x.mean(-1), X)

    assert _sharded(norm, Shard(2)) == []
    assert _sharded(norm, Shard(1)) == [Strategy((Shard(1), COPIED), Shard(1))]
    assert _sharded(soft, Shard(2)) == []
    assert _sharded(soft, Shard(1)) == [Strategy((Shard(1),), Shard(1))]
    assert _sharded(mean, Shard(2)) == []
    assert _sharded(mean, Shard(1)) == [Strategy((Shard(1),), Shard(1))]


def test_a_sum_may_be_of_summands() -> None:
    node = _node("sum", lambda x: x.sum(-1), X)

    assert _sharded(node, Shard(2)) == [Strategy((Shard(2),), PARTIAL)]


def test_dims_move_with_transpose_permute_and_select() -> None:
    assert _sharded(_node("transpose", lambda x: x.transpose(1, 2), X), Shard(2)) == [
        Strategy((Shard(2),), Shard(1))
    ]
    assert _sharded(_node("permute", lambda x: x.permute(2, 0, 1), X), Shard(2)) == [
        Strategy((Shard(2),), Shard(0))
    ]
    select = _node("select", lambda x: x[:, 0], X)
    assert _sharded(select, Shard(2)) == [Strategy((Shard(2),), Shard(1))]
    assert _sharded(select, Shard(1)) == []


def test_a_slice_of_the_sharded_dim_is_refused() -> None:
    half = _node("slice", lambda x: x[..., :8], X)
    whole = _node("slice", lambda x: torch.ops.aten.slice.Tensor(x, 2, 0, 2**63 - 1), X)
    sized = _node("slice", lambda x: torch.ops.aten.slice.Tensor(x, 2, 0, 16), X)

    assert _sharded(whole, Shard(2)) == [Strategy((Shard(2),), Shard(2))]
    assert _sharded(sized, Shard(2)) == []  # 16 is more than a shard has, but it need not be
    assert _sharded(half, Shard(2)) == []
    assert _sharded(half, Shard(1)) == [Strategy((Shard(1),), Shard(1))]


def test_cross_entropy_takes_sharded_classes() -> None:
    def loss(x: Tensor, logits: Tensor) -> Tensor:
        return F.cross_entropy(logits.expand(x.shape[0], 8), x)

    node = _node("cross_entropy_loss", loss, torch.zeros(3, dtype=torch.long), torch.randn(1, 8))
    smooth = _node(
        "cross_entropy_loss",
        lambda x, w: F.cross_entropy(w.expand(x.shape[0], 8), x, label_smoothing=0.1),
        torch.zeros(3, dtype=torch.long),
        torch.randn(1, 8),
    )

    assert _sharded(node, Shard(1)) == [Strategy((Shard(1), Replicate()), Replicate())]
    assert _sharded(smooth, Shard(1)) == []


def test_an_op_that_is_not_on_the_list_runs_replicated() -> None:
    node = _node("diagonal", lambda x: x.diagonal(dim1=0, dim2=1), X)

    assert _sharded(node, Shard(2)) == []


def test_batch_norm_writes_its_running_statistics() -> None:
    class Norm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm2d(4)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.norm(x).relu_()
            return out

    program = export_program(Norm(), (torch.randn(2, 4, 3, 3),))
    norm = next(node for node in program.nodes if op_name(node) == "batch_norm")
    relu = next(node for node in program.nodes if op_name(node) == "relu_")

    assert [arg.name for arg in written_args(norm)] == ["b_norm_running_mean", "b_norm_running_var"]
    assert written_args(relu) == [norm]
    assert _sharded(norm, Shard(1)) == [Strategy((Shard(1), *[Shard(0)] * 4), Shard(1))]


@pytest.mark.parametrize(
    ("source", "target", "shard", "expected"),
    [
        ((5, 7, 12), (5, 7, 4, 3), Shard(2), Shard(2)),  # hidden to heads
        ((5, 7, 4, 3), (5, 7, 12), Shard(2), Shard(2)),  # heads to hidden
        ((5, 7, 4, 3), (5, 7, 12), Shard(3), None),  # inside each head: 3 is odd
        ((5, 7, 3, 4), (5, 7, 12), Shard(3), Shard(2, blocks=3)),  # inner becomes strided
        ((5, 7, 12), (5, 7, 3, 4), Shard(2, blocks=3), Shard(3)),  # and back
        ((5, 7, 12), (5, 7, 3, 4), Shard(2), None),  # 3 heads on 2 devices
        ((5, 7, 12), (35, 12), Shard(2), Shard(1)),
        ((5, 4, 7), (20, 7), Shard(1), Shard(0, blocks=5)),
        ((5, 2, 2, 7), (5, 4, 7), Shard(1), Shard(1)),  # expanded keys
        ((5, 8, 7), (5, 1, 8, 7), Shard(1), Shard(2)),
        ((5, 1, 8), (5, 8), Shard(2), Shard(1)),
    ],
)
def test_where_a_sharding_goes_in_a_reshape(
    source: tuple[int, ...], target: tuple[int, ...], shard: Shard, expected: Shard | None
) -> None:
    assert reshaped(source, target, shard, 2) == expected


def _factors(length: int) -> st.SearchStrategy[list[int]]:
    return st.lists(st.sampled_from([1, 2, 3, 4]), min_size=1, max_size=length)


@settings(deadline=None, max_examples=200)
@given(
    sizes=_factors(4),
    merge=st.integers(0, 3),
    dim=st.integers(0, 3),
    blocks=st.integers(1, 3),
)
def test_a_reshape_of_a_shard_is_the_shard_of_the_reshape(
    sizes: list[int], merge: int, dim: int, blocks: int
) -> None:
    """Merging two dims, and splitting them again, against what the elements say."""
    dim, merge = dim % len(sizes), merge % len(sizes)
    assume(sizes[dim] % (2 * blocks) == 0)
    merged = [*sizes[:merge], *([_product(sizes[merge : merge + 2])]), *sizes[merge + 2 :]]
    full = torch.arange(_product(sizes)).reshape(sizes)
    shard = Shard(dim, blocks)

    for source, target in ((sizes, merged), (merged, sizes)):
        start = shard if source is sizes else reshaped(sizes, merged, shard, 2)
        if start is None:
            continue
        end = reshaped(source, target, start, 2)
        if end is None:
            continue
        for rank in range(2):
            local = cut(full.reshape(source), start.dim, start.blocks, rank, 2)
            expected = cut(full.reshape(target), end.dim, end.blocks, rank, 2)
            assert torch.equal(local.reshape(expected.shape), expected)


def _product(sizes: list[int]) -> int:
    product = 1
    for size in sizes:
        product *= size
    return product
