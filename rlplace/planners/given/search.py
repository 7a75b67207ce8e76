"""What all placers share: the best placement so far, the budget, and the result."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from rlplace.planners.given.types import Placed
from rlplace.planners.types import Limits

Found = TypeVar("Found")


@dataclass
class PlacementSearch(Generic[Found]):
    """Keeps the best placement that was offered; at any moment `result` is what was found so far.

    Args:
        name: Name of the placer.
        objective: Value of a placement, infinite if it is illegal.
        budget: What it may spend.
    """

    name: str
    objective: Callable[[Found], float]
    budget: Limits
    best: tuple[Found, float] | None = None
    evaluations: int = 0
    _started: float = field(default_factory=time.perf_counter)
    _curve: list[tuple[float, float]] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        """Wall seconds since the search began."""
        return time.perf_counter() - self._started

    @property
    def stopped(self) -> str | None:
        """Which part of the budget has run out, or None."""
        return self.budget.run_out(self.seconds, self.evaluations)

    @property
    def progress(self) -> float:
        """Share of the budget that is spent, 0 to 1, whichever part is nearer to its end."""
        return self.budget.progress(self.seconds, self.evaluations)

    @property
    def left(self) -> int:
        """Evaluations that are left."""
        return max(0, self.budget.evaluations - self.evaluations)

    def offer(self, placement: Found, evaluations: int = 1) -> float:
        """Value a placement, and remember it if it is the best so far.

        Args:
            placement: Legal or not.
            evaluations: Placements that were looked at to find it, itself included.
        """
        return self.take(placement, self.objective(placement), evaluations)

    def take(self, placement: Found, value: float, evaluations: int = 1) -> float:
        """`offer` a placement of which the value is known."""
        self.evaluations += evaluations
        if value < (float("inf") if self.best is None else self.best[1]):
            self.best = (placement, value)
            self._curve.append((self.seconds, value))
        return value

    def result(self) -> Placed[Found]:
        """What was found so far."""
        placement, value = self.best or (None, float("inf"))
        return Placed(
            placement=placement,
            value=value,
            placer=self.name,
            evaluations=self.evaluations,
            seconds=self.seconds,
            stopped=self.stopped or "done",
            curve=tuple(self._curve),
        )
