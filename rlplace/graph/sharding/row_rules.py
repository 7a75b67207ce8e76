"""Attention and cross entropy over rows that are cut, where a sharding follows the sequence.

Rules of their own, as in `sharding.rules`. Attention whose queries are cut by rows may read
all keys and values (they are gathered), or go between its heads (an all-to-all before and after:
Jacobs et al., 2023); the search sees the price of both.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from rlplace.graph.sharding.nodes import argument, shape, tensor_args
from rlplace.graph.sharding.strategy import REPLICATE, Copied, Strategy, Want, divides
from rlplace.graph.types import Shard


def attention_rows(node: fx.Node, degree: int, shards: Sequence[Shard]) -> list[Strategy]:
    """Strategies of attention whose queries can be cut in the ways `shards`."""
    args = tensor_args(node)
    sizes = [shape(arg) for arg in args]
    rank = len(sizes[0])
    rows = Shard(rank - 2)
    if rank < 3 or rows not in shards or any(len(size) != rank for size in sizes[:3]):
        return []
    heads = [
        Shard(dim)
        for dim in range(1, rank - 2)
        if all(divides(size[dim], degree) for size in sizes[:3])
    ]
    found = [
        Strategy((head, head, head, *(_aligned(size, rank, head) for size in sizes[3:])), head)
        for head in heads
    ]
    if is_causal(node) and sizes[0][-2] != sizes[1][-2]:
        return found
    masks = [_aligned(size, rank, rows) for size in sizes[3:]]
    return [Strategy((rows, Copied(), Copied(), *masks), rows), *found]


def is_causal(node: fx.Node) -> bool:
    """Whether attention masks the keys behind each query."""
    return bool(argument(node, 5, "is_causal", False))


def _aligned(size: tuple[int, ...], rank: int, shard: Shard) -> Want:
    """How a mask of a size is read: dims are aligned on the right, those of 1 are broadcast."""
    dim = shard.dim - (rank - len(size))
    return Shard(dim) if dim >= 0 and size[dim] != 1 else Copied()


def cross_entropy_rows(node: fx.Node, shard: Shard) -> list[Strategy]:
    """Logits (rows, classes) with the rows cut; the loss comes out whole."""
    smoothing = argument(node, 5, "label_smoothing")
    plain = argument(node, 2, "weight") is None and not smoothing
    logits, target = (arg.meta["val"] for arg in tensor_args(node)[:2])
    indices = not target.is_floating_point() and logits.ndim == 2
    reduced = argument(node, 3, "reduction", 1) in (1, 2)
    if shard.dim == 0 and plain and indices and reduced:
        return [Strategy((shard, shard), REPLICATE)]
    return []
