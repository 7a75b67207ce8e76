"""What one rank of a tp axis holds and runs: shards of states, lowered pieces."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from rlplace.errors import InputError
from rlplace.graph.layouts import solve
from rlplace.graph.program import Piece
from rlplace.graph.sharding.axis import Axis, CollectiveKind
from rlplace.graph.sharding.lower import lower
from rlplace.graph.types import Layout, Placement, Replicate
from rlplace.runtime.shard import shard_parameter


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
        axis: Its tp axis, if it has one.
    """

    def __init__(
        self, full: Mapping[str, Tensor], device: torch.device, axis: Axis | None = None
    ) -> None:
        self._full, self._device, self._axis = full, device, axis
        self._made: dict[str, Tensor] = {}
        self.placements: dict[str, Placement] = {}

    def get(self, name: str, placement: Placement) -> Tensor:
        """This rank's part of a state; groups that share it get the same tensor.

        Raises:
            InputError: If another group holds it in another way.
        """
        held = self.placements.setdefault(name, placement)
        if held != placement:
            rule = f"{name} is held as {held} by one group and as {placement} by another"
            raise InputError("plan.stages.choices.layout", name, rule)
        if name not in self._made:
            self._made[name] = self._make(self._full[name], placement)
        return self._made[name]

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of the whole state."""
        return tuple(self._full[name].shape)

    def _make(self, full: Tensor, placement: Placement) -> Tensor:
        part = full.detach()
        if not isinstance(placement, Replicate):
            assert self._axis is not None
            part = shard_parameter(full, placement, self._axis.rank, self._axis.size)
        part = part.to(self._device).contiguous()
        if isinstance(full, nn.Parameter):
            return nn.Parameter(part, requires_grad=full.requires_grad)
        return part


def localized(piece: Piece, layout: Layout, grads: set[str]) -> tuple[Piece, dict[str, Placement]]:
    """A piece as one rank of a tp axis runs it, and how its states are held (by name).

    Args:
        piece: The whole piece.
        layout: How it is sharded.
        grads: Nodes and placeholders of the program that a gradient flows back to.

    Raises:
        InputError: If the piece does not have the layout.
    """
    names = tuple(dict.fromkeys(name for _, name in piece.states))
    if layout.name == "replicate":
        return piece, dict.fromkeys(names, Replicate())
    if layout.axis != "tp" or layout.reads or layout.writes:
        rule = "a run keeps activations whole between groups"
        raise InputError("plan.stages.choices.layout", layout.name, rule, "shard")
    pinned = dict(zip(names, layout.params, strict=True))
    places = {place for place, _ in piece.states} | set(piece.reads)
    assignment = solve(piece, layout.degree, places & grads, pinned)
    if assignment is None:
        rule = f"the ops {piece.writes} have no layout {layout.name} at tp={layout.degree}"
        raise InputError("plan.stages.choices.layout", layout.name, rule, "replicate")
    return replace(piece, module=lower(piece, assignment)), pinned
