"""Weights of matmuls that can be gathered slice by slice, each used before the next one comes.

Operator splitting (Jiang et al., OSDP, arXiv 2209.13258): slices of rows of a weight give columns
of a ``linear``, and summands of an ``mm``, whose weight is transposed.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import fx

from rlplace.graph.program import Piece, base_of, writes_in_place
from rlplace.graph.sharding.nodes import op_name
from rlplace.graph.types import Layout, Placement, Replicate, Shard, Weight


@dataclass(frozen=True)
class Matmul:
    """A node that multiplies rows by a matrix.

    Args:
        rows: The rows.
        weight: The matrix: (result, summed) of a linear, (summed, result) of others.
        added: A bias, or whatever is added to the product; None where nothing is.
        linear: Whether it is a linear.
    """

    rows: Any
    weight: Any
    added: Any
    linear: bool


def matmul_of(node: fx.Node) -> Matmul | None:
    """What a node multiplies, if it is a plain matmul."""
    name, args = op_name(node), node.args
    if node.kwargs:
        return None
    if name == "linear":
        return Matmul(args[0], args[1], args[2] if len(args) > 2 else None, True)
    if name in ("mm", "matmul"):
        return Matmul(args[0], args[1], None, False)
    return Matmul(args[1], args[2], args[0], False) if name == "addmm" else None


def weights_of(piece: Piece, params: Collection[str]) -> tuple[Weight, ...]:
    """The weights that can be cut into slices, in the order in which they are used.

    Each is a matrix that one matmul reads and nothing else. Between the ops before a matmul and
    those behind it tensors are handed on, so no op behind it writes into one of before.

    Args:
        piece: The whole piece; its nodes carry ``meta["val"]``.
        params: Fully qualified names of parameters that no other piece uses.
    """
    names = [name for _, name in piece.states]
    alone = {place for place, name in piece.states if names.count(name) == 1 and name in params}
    positions = {name: at for at, name in enumerate(dict.fromkeys(names))}
    held, nodes = dict(piece.states), list(piece.module.graph.nodes)
    found = []
    for node in nodes:
        product = matmul_of(node)
        if product is None or not _own(product.weight, alone) or _written_over(nodes, node, held):
            continue
        if product.linear and product.added is not None and not _own(product.added, alone):
            continue
        shape = product.weight.meta["val"].shape
        if len(shape) != 2:
            continue
        bias = product.added.meta["val"].numel() if product.linear and product.added else 0
        place = positions[held[product.weight.name]]
        found.append(Weight(place, int(shape[0]), int(shape[1]), product.linear, int(bias)))
    return tuple(found)


def held_by(weights: Sequence[Weight], layout: Layout) -> tuple[Weight, ...]:
    """The same weights as a device of a layout holds them."""
    return tuple(_local(one, _placement(layout, one), layout.degree) for one in weights)


def _own(value: Any, alone: Collection[str]) -> bool:
    """Whether a value is one of some placeholders, and is read once."""
    return isinstance(value, fx.Node) and value.name in alone and len(value.users) == 1


def _written_over(nodes: Sequence[fx.Node], node: fx.Node, states: Collection[str]) -> bool:
    """Whether something behind a node writes into what was made before it, states apart."""
    written = (base_of(one) for one in nodes[nodes.index(node) + 1 :] if writes_in_place(one))
    return any(base < node and base.name not in states for base in written)


def _placement(layout: Layout, weight: Weight) -> Placement:
    return layout.params[weight.param] if layout.params else Replicate()


def _local(weight: Weight, placement: Placement, degree: int) -> Weight:
    if not isinstance(placement, Shard):
        return weight
    if placement.dim == 1:  # a bias of summands is added to their sum
        return replace(weight, columns=weight.columns // degree, bias=0)
    return replace(weight, rows=weight.rows // degree, bias=weight.bias // degree)
