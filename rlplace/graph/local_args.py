"""The arguments of an op as one device of the tp axis calls it: sizes of the whole become local."""

from __future__ import annotations

from typing import Any

from torch import fx

from rlplace.graph.nodes import SPLITS, conv_groups, op_name, split_parts
from rlplace.graph.rules import Strategy
from rlplace.graph.types import Shard


def local_args(node: fx.Node, strategy: Strategy, args: list[Any], degree: int) -> list[Any]:
    """The arguments of an op with the sizes of a shard."""
    name, output = op_name(node), strategy.output
    local = list(args)
    if name in ("view", "reshape", "_unsafe_view", "expand") and isinstance(output, Shard):
        local[1] = _shorter(args[1], output.dim, degree)
    elif name == "unflatten" and isinstance(output, Shard):
        first = int(args[1]) % node.args[0].meta["val"].ndim  # type: ignore[union-attr]
        if 0 <= output.dim - first < len(args[2]):
            local[2] = _shorter(args[2], output.dim - first, degree)
    elif name in SPLITS and name != "chunk":
        read = strategy.reads[0]
        if isinstance(read, Shard) and split_parts(node)[0] == read.dim:
            sizes = args[1]
            whole = isinstance(sizes, int)
            local[1] = sizes // degree if whole else [size // degree for size in sizes]
    elif name == "conv2d" and conv_groups(node) > 1:
        local[6] = conv_groups(node) // degree
    return local


def _shorter(sizes: list[Any], dim: int, degree: int) -> list[Any]:
    """Sizes with that of one dim made local; -1 is worked out by the op itself."""
    local = list(sizes)
    if local[dim] != -1:
        local[dim] = local[dim] // degree
    return local
