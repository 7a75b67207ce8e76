"""Ops that make other runs of a cut dim (see `Shard.blocks`), and ops that make tensors of nothing.

Rules of their own, as in `rlplace.graph.sharding.rules`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from torch import fx

from rlplace.graph.sharding.nodes import argument, shape, tensor_args, written_args
from rlplace.graph.sharding.strategy import REPLICATE, Strategy, Want, divides
from rlplace.graph.types import Replicate, Shard


def glu(node: fx.Node, degree: int, index: int, shard: Shard) -> list[Strategy]:
    """Two halves of a dim, multiplied: a sharded dim must have twice as many runs."""
    dim = argument(node, 1, "dim", -1) % len(shape(node))
    if dim != shard.dim:
        return [Strategy((shard,), shard)]
    return [Strategy((shard,), Shard(dim, shard.blocks // 2))] if shard.blocks % 2 == 0 else []


def repeat(node: fx.Node, degree: int, index: int, shard: Shard) -> list[Strategy]:
    """A dim that is repeated has so many times the runs."""
    times = argument(node, 1, "repeats")
    added = len(shape(node)) - len(shape(tensor_args(node)[0]))
    count = times[added + shard.dim]
    if not isinstance(count, int):
        return []
    return [Strategy((shard,), Shard(added + shard.dim, shard.blocks * count))]


def made(
    node: fx.Node,
    degree: int,
    reachable: Mapping[fx.Node, Collection[Shard]],
    block_counts: Collection[int],
) -> list[Strategy]:
    """Zeros and the like, where a later op writes into them; a shard of them is free.

    Of a tensor argument only the dtype is used, so it is read as it is held.
    """
    args = tensor_args(node)
    written = any(node in written_args(user) for user in node.users)
    held: Sequence[Want] = [REPLICATE, *reachable.get(args[0], ())] if args else [REPLICATE]
    outputs: list[Replicate | Shard] = [REPLICATE]
    outputs += [
        Shard(dim, blocks)
        for dim, size in enumerate(shape(node))
        for blocks in block_counts
        if written and divides(size, degree, blocks)
    ]
    return [Strategy((want,) * len(args), output) for want in held for output in outputs]
