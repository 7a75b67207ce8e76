"""The products that a matmul-like op takes, from the shapes of an exported node."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch import fx

from rlplace.graph.shapes import at_batch
from rlplace.graph.sharding.nodes import CONVOLUTIONS, is_transposed, op_name, tensor_args

_MATMULS = ("linear", "mm", "bmm", "matmul", "mv")
_ADDED_MATMULS = ("addmm", "baddbmm", "addbmm", "addmv")


def matmul(node: fx.Node) -> tuple[float, list[fx.Node]]:
    """(Multiplications for one sample, the arguments whose gradient takes as many again)."""
    name, args = op_name(node).rstrip("_"), tensor_args(node)
    if name in _MATMULS or "grouped_mm" in name:
        return _size(node) * _sizes(args[0])[-1], args[:2]
    if name in _ADDED_MATMULS:
        batches = _sizes(args[1])[0] if name == "addbmm" else 1
        return _size(node) * _sizes(args[1])[-1] * batches, args[1:3]
    if name in CONVOLUTIONS:
        positions = args[0] if is_transposed(node) else node
        return _size(positions) * math.prod(_sizes(args[1])[1:]), args[:2]
    if name == "einsum":
        return _einsum(node, args), args
    if name == "scaled_dot_product_attention":
        # Scores and the sum over values: as if each output feature took two products a key.
        return _size(node) * 2 * _sizes(args[1])[-2], args[:2]
    return 0.0, []


def _einsum(node: fx.Node, args: Sequence[fx.Node]) -> float:
    """Every combination of labels is one product; nothing is multiplied with one operand."""
    sizes: dict[str, int] = {}
    terms = str(node.args[0]).replace(" ", "").split("->")[0].split(",")
    if len(args) < 2 or any("." in term for term in terms):
        return _size(node) if len(args) > 1 else 0.0
    for term, arg in zip(terms, args, strict=True):
        for label, size in zip(term, _sizes(arg), strict=True):
            sizes[label] = max(size, sizes.get(label, 1))
    return float(math.prod(sizes.values()))


def _sizes(node: fx.Node) -> list[int]:
    """Shape for one sample."""
    value: Any = node.meta["val"]
    return [at_batch(size, 1) for size in value.shape]


def _size(node: fx.Node) -> float:
    return float(math.prod(_sizes(node)))
