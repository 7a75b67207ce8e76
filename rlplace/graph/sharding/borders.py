"""How a piece reads and writes activations: what its layouts have in common with its neighbours'.

With whole borders any two layouts may be neighbours. With sequences cut between the groups
(Korthikanti et al., 2022) norms and residuals are shared as well, and an all-reduce becomes a
reduce-scatter and an all-gather of the same bytes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor, fx

from rlplace.graph.program import Piece
from rlplace.graph.sharding.nodes import shape
from rlplace.graph.sharding.strategy import REPLICATE, divides
from rlplace.graph.types import Replicate, Shard

#: None where the search may choose.
Held = Replicate | Shard | None


@dataclass(frozen=True)
class Border:
    """Placements of what a piece reads and writes on an axis.

    Args:
        axis: On ``cp`` the gradients of states are summands: what reduces gradients over the
            data-parallel replicas sums them over this axis too.
        reads: By placeholder; those not named are replicated.
        writes: In the order of `Piece.writes`; empty if all are replicated.
        lengths: Of the sequences that are cut: a sum may be left on the devices cut so.
        routes: Whether each device sorts its own rows and sends them to the devices of their
            experts; other states are read whole as if that were free.
    """

    axis: Literal["tp", "cp"] = "tp"
    reads: Mapping[str, Held] = field(default_factory=dict)
    writes: Sequence[Held] = ()
    lengths: frozenset[int] = frozenset()
    routes: bool = False

    @property
    def whole(self) -> bool:
        """Whether everything is replicated."""
        held = (*self.reads.values(), *self.writes)
        return self.axis == "tp" and all(each == REPLICATE for each in held)


WHOLE = Border()


def cut_border(
    piece: Piece, activations: Collection[str], degree: int, axis: Literal["tp", "cp"]
) -> Border | None:
    """Sequences (dim 1 of float activations of rank 3) cut; None where there are none to cut.

    Args:
        piece: Whose nodes carry ``meta["val"]``.
        activations: Those of its reads that other groups make.
        degree: Size of the axis.
        axis: Which one.
    """
    reads, writes = _values(piece, activations)
    held = {node.name: _along_sequence(node, degree, axis) for node in reads}
    left = tuple(_along_sequence(node, degree, axis) for node in writes)
    cut = [(node, p) for node, p in zip((*reads, *writes), (*held.values(), *left), strict=True)]
    lengths = frozenset(shape(node)[1] for node, placement in cut if placement == Shard(1))
    return Border(axis, held, left, lengths) if lengths else None


def free_border(piece: Piece, activations: Collection[str]) -> Border | None:
    """Sequences whole, and what has more dims held as the search likes; None where all is whole."""
    reads, writes = _values(piece, activations)
    held = {node.name: _as_it_likes(node) for node in reads}
    left = tuple(_as_it_likes(node) for node in writes)
    return Border("tp", held, left) if None in (*held.values(), *left) else None


def _values(piece: Piece, activations: Collection[str]) -> tuple[list[fx.Node], Sequence[fx.Node]]:
    nodes = list(piece.module.graph.nodes)
    reads = [n for n in nodes if n.op == "placeholder" and n.name in activations]
    return reads, nodes[-1].args[0]


def _along_sequence(node: fx.Node, degree: int, axis: Literal["tp", "cp"]) -> Held:
    dims = shape(node) if _floats(node) else ()
    if len(dims) == 3 and divides(dims[1], degree):
        return Shard(1)
    return None if len(dims) > 3 and axis == "tp" else REPLICATE


def _as_it_likes(node: fx.Node) -> Held:
    return None if _floats(node) and len(shape(node)) > 3 else REPLICATE


def _floats(node: fx.Node) -> bool:
    value = node.meta["val"]
    return isinstance(value, Tensor) and value.is_floating_point()
