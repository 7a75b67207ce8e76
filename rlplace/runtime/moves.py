"""How a value is held on a cp and a tp axis at once, and the way from one such form to another.

Each conversion is that of one axis, on what the other has left. Where both cut the same dim one of
them is inside the other: tp cuts the sequence that cp has cut, and cp the heads that tp has cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from rlplace.errors import InputError
from rlplace.graph.sharding.lower import route
from rlplace.graph.sharding.strategy import REPLICATE, Copied, Want
from rlplace.graph.types import Placement, Shard
from rlplace.runtime.boundary import AxisName

#: A conversion on an axis.
Move = tuple[AxisName, Want]


@dataclass(frozen=True, slots=True)
class Held:
    """How a value is held on both axes.

    Args:
        cp, tp: On each of them.
        outer: Where both cut the same dim, which one cuts it first.
    """

    cp: Placement | Copied = REPLICATE
    tp: Placement | Copied = REPLICATE
    outer: AxisName = "cp"

    @property
    def shared(self) -> bool:
        """Whether both cut the same dim."""
        both = isinstance(self.cp, Shard) and isinstance(self.tp, Shard)
        return both and self.cp.dim == self.tp.dim  # type: ignore[union-attr]  # both are shards

    def on(self, name: AxisName) -> Placement | Copied:
        """On one of them."""
        return self.cp if name == "cp" else self.tp

    def moved(self, name: AxisName, step: Want, inside: bool = False) -> Held | None:
        """After a conversion on one axis; None where the other one is in its way.

        Args:
            name: The axis.
            step: The conversion.
            inside: Whether cp may cut what tp has cut, as it may when it exchanges rows for heads.
        """
        own, other = self.on(name), self.on("tp" if name == "cp" else "cp")
        outer = self.outer
        if isinstance(other, Shard):
            if self.shared and self.outer == name:
                return None
            if isinstance(step, Shard) and step.dim == other.dim:
                exchanged = isinstance(own, Shard) and own.dim != step.dim
                if name == "cp" and not (exchanged or inside):
                    return None
                if step.blocks > 1 or other.blocks > 1 or (step.run and name == "cp"):
                    return None
                outer = "tp" if name == "cp" else "cp"
        placed = replace(self, cp=step) if name == "cp" else replace(self, tp=step)
        return replace(placed, outer=outer) if placed.shared else replace(placed, outer="cp")


def moves(base: Held, cp: Want, tp: Want, outer: AxisName = "cp") -> list[Move]:
    """The conversions, one after the other, that bring a value into a form.

    Args:
        base: How it is held.
        cp: How it is read on cp.
        tp: And on tp.
        outer: Which axis should cut first where both cut one dim.

    Raises:
        InputError: If there is no order in which no axis is in the other's way.
    """
    by_cp: list[Move] = [("cp", step) for step in route(base.cp, cp)]
    by_tp: list[Move] = [("tp", step) for step in route(base.tp, tp)]
    whole: list[Move] = [("tp", step) for step in route(base.tp, REPLICATE)]
    again: list[Move] = [("tp", step) for step in route(REPLICATE, tp)]
    possible: list[list[Move]] = []
    for path in ([*by_cp, *by_tp], [*by_tp, *by_cp], [*whole, *by_cp, *again]):
        reached = _reached(base, path, outer)
        # Without a wish, what cp exchanges ends inside of what tp has cut: that is the cheapest.
        if reached is not None and (not reached.shared or outer in ("cp", reached.outer)):
            return path
        possible += [path] if reached is not None else []
    if possible:
        return possible[0]
    rule = f"cp and tp cannot both cut what is held as {base} and read as {cp}, {tp}"
    raise InputError("plan.stages.mesh.cp", str(base), rule, 1)


def _reached(base: Held, path: Sequence[Move], outer: AxisName) -> Held | None:
    held: Held | None = base
    for name, step in path:
        held = held.moved(name, step, outer == "tp") if held is not None else None
    return held
