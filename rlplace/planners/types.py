"""Decisions without learning: the protocol that every planner obeys, the policy's own included."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from rlplace.plan.types import Instance, Plan
from rlplace.simulate.types import Estimate


@dataclass(frozen=True, slots=True)
class Budget:
    """How long a planner may search; whatever runs out first ends it."""

    seconds: float = float("inf")
    evaluations: int = 1_000_000_000

    def deadline(self) -> float:
        """The `time.perf_counter` value at which the seconds run out."""
        return time.perf_counter() + self.seconds

    def after(self, result: PlannerResult) -> Budget:
        """What is left of the budget after a search."""
        return Budget(
            max(0.0, self.seconds - result.seconds), max(0, self.evaluations - result.evaluations)
        )


@dataclass(frozen=True)
class PlannerResult:
    """What a planner found.

    Args:
        plan: The best plan, or None if no plan that it looked at fits.
        estimate: Its estimate; of the least overfull plan where none fits.
        planner: Name of the planner.
        evaluations: Plans that were estimated.
        seconds: Wall seconds.
        stopped: Why it stopped: ``done``, ``seconds`` or ``evaluations``.
        curve: (seconds, step time) at each improvement.
        overfull: The least overfull plan, where none fits.
        overflow: How far its fullest device is over the limit, as a share of the limit.
    """

    plan: Plan | None
    estimate: Estimate | None
    planner: str
    evaluations: int
    seconds: float
    stopped: str = "done"
    curve: tuple[tuple[float, float], ...] = field(default_factory=tuple)
    overfull: Plan | None = None
    overflow: float = 0.0


class Planner(Protocol):
    """Anything that turns an instance into a plan."""

    def __call__(
        self, instance: Instance, budget: Budget, rng: np.random.Generator
    ) -> PlannerResult:
        """The best plan within the budget; same seed, same plan."""
        ...
