"""What a rank holds of a training state, under names that do not depend on the plan.

Each parameter, state of the optimizer and buffer is an item (``weight/NAME``, ``exp_avg/NAME``).
An item is one 1-D tensor for each coordinate of the tp axis that holds it, and a rank has a run of
one of them. A rank of another plan reads the run it needs; where the tp axis holds the item in
another way, it reads that one item as a whole and cuts it anew.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from torch import Tensor

from rlplace.graph.types import Replicate, Shard
from rlplace.runtime.assemble import Assembly
from rlplace.runtime.fragments import Fragment
from rlplace.runtime.weight_slices import WeightSlice


@dataclass(frozen=True)
class Holding:
    """How a tp axis holds an item.

    Args:
        item: Kind and fully qualified name.
        shape: Shape of the whole.
        placement: Its placement on the axis.
        size: Size of the axis; 1 where every rank holds all of it.
    """

    item: str
    shape: tuple[int, ...]
    placement: Replicate | Shard = field(default_factory=Replicate)
    size: int = 1

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of what one coordinate holds."""
        if not isinstance(self.placement, Shard):
            return self.shape
        dim = self.placement.dim
        return (*self.shape[:dim], self.shape[dim] // self.size, *self.shape[dim + 1 :])

    @property
    def length(self) -> int:
        """Elements of what one coordinate holds."""
        return math.prod(self.local_shape)

    def key(self, rank: int) -> str:
        """Name of what a coordinate holds."""
        if not isinstance(self.placement, Shard):
            return f"{self.item}@0.of.1"
        cut = f"{self.placement.dim}.{self.placement.blocks}.{self.placement.run}"
        return f"{self.item}@{rank}.of.{self.size}/{cut}"


@dataclass(frozen=True)
class Piece:
    """A run of an item on one rank.

    Args:
        holding: Of the item.
        rank: Coordinate on the tp axis.
        start: First element of the run in what the coordinate holds, flattened.
        tensor: The elements, flat; a view that may be written into.
    """

    holding: Holding
    rank: int
    start: int
    tensor: Tensor

    @property
    def key(self) -> str:
        """Name of what this is a run of."""
        return self.holding.key(self.rank)

    @property
    def stop(self) -> int:
        """Behind the last element."""
        return self.start + self.tensor.numel()


def pieces(assembly: Assembly, *, every_state: bool = False) -> Iterator[Piece]:
    """All that a rank holds.

    Args:
        assembly: What the rank runs.
        every_state: Also states that the optimizer has not made yet.
    """
    for fragment in assembly.fragments(every_state=every_state):
        yield from _stepped(fragment)
    rank, size = assembly.tp

    def piece(kind: str, name: str, start: int, tensor: Tensor) -> Piece:
        placement = assembly.placements[name]
        return Piece(
            _holding(f"{kind}/{name}", assembly.shapes[name], placement, size), rank, start, tensor
        )

    frozen = {id(p): n for n, p in assembly.params().items() if not p.requires_grad}
    lent = assembly.reducer.lent if assembly.reducer is not None else []
    spans = [(span, weights.own) for weights in lent for span in weights.spans]
    for span, own in spans:
        if id(span.param) in frozen:
            part = WeightSlice.of(frozen[id(span.param)])
            start = part.start(span.param) + span.start
            yield piece("weight", part.name, start, span.of(own))
    cut = {id(param) for weights in lent for param in weights.layout.params}
    whole = {n: p for n, p in assembly.params().items() if id(p) in frozen and id(p) not in cut}
    for kind, tensors in (("weight", whole), ("buffer", assembly.buffers())):
        for name, tensor in tensors.items():
            yield piece(kind, name, 0, tensor.detach().view(-1))


def _stepped(fragment: Fragment) -> Iterator[Piece]:
    for kind, tensor in fragment.values.items():
        item = f"{kind}/{fragment.name}"
        holding = _holding(item, fragment.shape, fragment.placement, fragment.size)
        yield Piece(holding, fragment.rank, fragment.start, tensor)
    for kind, tensor in fragment.numbers.items():
        shape = tuple(tensor.shape)
        item = f"{kind}/{fragment.name}"
        if tensor.numel() > 1 and isinstance(fragment.placement, Shard):
            # A summary of one shard, which no other way of cutting has.
            item = f"{item}#{fragment.rank}.of.{fragment.size}"
        yield Piece(Holding(item, shape), 0, 0, tensor.view(-1))


def _holding(item: str, shape: tuple[int, ...], placement: object, size: int) -> Holding:
    if size > 1 and isinstance(placement, Shard):
        return Holding(item, shape, placement, size)
    return Holding(item, shape)
