"""What one rank of a tp or cp axis holds and runs: shards of states, lowered pieces."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from rlplace.errors import InputError
from rlplace.graph.layouts import borders_of, placements_of, solve
from rlplace.graph.program import Piece
from rlplace.graph.sharding.axis import Axis, CollectiveKind
from rlplace.graph.sharding.borders import WHOLE
from rlplace.graph.sharding.lower import Assignment, lower
from rlplace.graph.types import Layout, Placement, Replicate
from rlplace.runtime.boundary import Form
from rlplace.runtime.shard import shard_parameter
from rlplace.runtime.two_axes import fewer_heads, heads_left, lower_both
from rlplace.runtime.weight_slices import WeightSlice


@dataclass
class CountedAxis:
    """An axis that counts the bytes that this rank gives to it."""

    axis: Axis
    traffic: dict[str, int] = field(
        default_factory=lambda: dict.fromkeys(get_args(CollectiveKind), 0)
    )

    @property
    def rank(self) -> int:
        """Coordinate of this rank."""
        return self.axis.rank

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.axis.size

    def all_reduce(self, tensor: Tensor, op: Literal["sum", "max"] = "sum") -> Tensor:
        """Sum or maximum over the ranks."""
        self._count("all_reduce", tensor)
        return self.axis.all_reduce(tensor, op)

    def all_gather(self, tensor: Tensor, dim: int) -> Tensor:
        """The tensors of all ranks, joined along a dim."""
        self._count("all_gather", tensor)
        return self.axis.all_gather(tensor, dim)

    def reduce_scatter(self, tensor: Tensor, dim: int) -> Tensor:
        """This rank's chunk of the sum over the ranks."""
        self._count("reduce_scatter", tensor)
        return self.axis.reduce_scatter(tensor, dim)

    def all_to_all(self, tensor: Tensor, dim: int, joined: int) -> Tensor:
        """A chunk for every rank."""
        self._count("all_to_all", tensor)
        return self.axis.all_to_all(tensor, dim, joined)

    def all_to_all_rows(self, tensor: Tensor, sent: Sequence[int], got: Sequence[int]) -> Tensor:
        """Rows for every rank, as many as it is sent."""
        self._count("all_to_all", tensor)
        return self.axis.all_to_all_rows(tensor, sent, got)

    def _count(self, kind: CollectiveKind, tensor: Tensor) -> None:
        self.traffic[kind] += tensor.numel() * tensor.element_size()


class LocalStates:
    """The parameters, buffers and constants of one rank, each made when it is first asked for.

    Args:
        full: All of them, whole, by fully qualified name.
        device: Where the rank computes.
        axis: Its tp or cp axis, if it has one.
    """

    def __init__(
        self, full: Mapping[str, Tensor], device: torch.device, axis: Axis | None = None
    ) -> None:
        self._full, self.device, self._axis = full, device, axis
        self._made: dict[str, Tensor] = {}
        self.placements: dict[str, Placement] = {}

    def get(self, name: str, placement: Placement) -> Tensor:
        """This rank's part of a state, or a slice of it; groups that share it get the same tensor.

        Raises:
            InputError: If another group holds it in another way.
        """
        own = WeightSlice.of(name)
        held = self.placements.setdefault(own.name, placement)
        if held != placement:
            rule = f"{own.name} is held as {held} by one group and as {placement} by another"
            raise InputError("plan.stages.choices.layout", own.name, rule)
        if name not in self._made:
            self._made[name] = self._make(own, placement)
        return self._made[name]

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of the whole state."""
        return tuple(self._full[name].shape)

    def _make(self, own: WeightSlice, placement: Placement) -> Tensor:
        full = self._full[own.name]
        part = full.detach()
        if not isinstance(placement, Replicate):
            assert self._axis is not None
            part = shard_parameter(full, placement, self._axis.rank, self._axis.size)
        part = own.take(part).to(self.device).contiguous()
        if isinstance(full, nn.Parameter):
            return nn.Parameter(part, requires_grad=full.requires_grad)
        return part


@dataclass(frozen=True)
class Localized:
    """A piece as one rank of its axes runs it.

    Args:
        piece: With a lowered module.
        states: How its states are held on tp, by name; on cp they are whole.
        reads: How it reads what other groups make; whole, where not named.
        writes: How it leaves what it makes, likewise.
    """

    piece: Piece
    states: Mapping[str, Placement]
    reads: Mapping[str, Form] = field(default_factory=dict)
    writes: Mapping[str, Form] = field(default_factory=dict)


def localized(
    piece: Piece, context: Layout, layout: Layout, grads: set[str], prologue: Collection[str]
) -> Localized:
    """A piece as one rank of a mesh runs it.

    Where a program casts, its edges differ a little between precisions, so the placements of
    activations are those that the piece itself has, not those that the layouts list.

    Args:
        piece: The whole piece.
        context: How it is sharded on cp.
        layout: And on tp.
        grads: Nodes and placeholders of the program that a gradient flows back to.
        prologue: Nodes of the program that are whole on every rank.

    Raises:
        InputError: If the piece does not have the layouts.
    """
    names = tuple(dict.fromkeys(name for _, name in piece.states))
    made = tuple(name for name in piece.reads if name not in prologue)
    inner = _assignment(piece, layout, grads, made)
    outer = _assignment(piece, context, grads, made)
    if not heads_left(piece, outer, inner):
        with fewer_heads(piece, inner):
            outer = _assignment(piece, context, grads, made)
    if context.degree == 1:
        idle = layout.degree == 1 or layout.name == "replicate"
        module = piece.module if idle else lower(piece, inner)
    else:
        module = lower(piece, outer) if layout.degree == 1 else lower_both(piece, outer, inner)
    return Localized(
        replace(piece, module=module),
        {name: placements_of(piece, inner)[name] for name in names},
        {name: Form(outer.held(name), inner.held(name)) for name in made},
        {
            name: Form(*(own.writes[at] if own.writes else Replicate() for own in (outer, inner)))
            for at, name in enumerate(piece.writes)
        },
    )


def _assignment(piece: Piece, layout: Layout, grads: set[str], made: Collection[str]) -> Assignment:
    """The strategies of a layout."""
    places = {place for place, _ in piece.states} | set(piece.reads)
    if layout.name == "replicate":
        if layout.axis == "tp" or layout.degree == 1:
            return Assignment(layout.degree)
        # All ranks of cp run it alike: the gradients of its states are summands.
        summands = frozenset(place for place, _ in piece.states if place in grads)
        return Assignment(layout.degree, summands=summands)
    names = tuple(dict.fromkeys(name for _, name in piece.states))
    border = borders_of(piece, made, layout.degree).get(layout.name, WHOLE)
    pinned = dict(zip(names, layout.params, strict=True))
    found = solve(piece, layout.degree, places & grads, pinned, border)
    if found is None or placements_of(piece, found) != pinned:
        where = f"{layout.axis}={layout.degree}"
        rule = f"the ops {piece.writes} have no layout {layout.name} at {where}"
        raise InputError("plan.stages.choices.layout", layout.name, rule, "replicate")
    return found
