"""Decisions without learning: the protocol that every planner obeys, the policy's own included."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, Self

import numpy as np

from rlplace.plan.types import Instance, Plan
from rlplace.planners.costing import Costing
from rlplace.simulate.types import Estimate

#: Told of each improvement: the plan, its estimate, and the seconds since the search began.
Listener = Callable[[Plan, Estimate, float], None]


class Spent(Protocol):
    """What a search has used up of its limits."""

    @property
    def seconds(self) -> float:
        """Wall seconds."""
        ...

    @property
    def evaluations(self) -> int:
        """Answers that were estimated."""
        ...


@dataclass(frozen=True, slots=True)
class Limits:
    """How long a search may go on; whatever runs out first ends it.

    Args:
        seconds: Wall seconds.
        evaluations: Plans (or placements) that are estimated.
    """

    seconds: float = float("inf")
    evaluations: int = 1_000_000_000

    def run_out(self, seconds: float, evaluations: int) -> str | None:
        """Which part has run out after so much, or None."""
        if seconds >= self.seconds:
            return "seconds"
        return "evaluations" if evaluations >= self.evaluations else None

    def progress(self, seconds: float, evaluations: int) -> float:
        """Share that is spent, 0 to 1, whichever part is nearer to its end."""
        evaluated = evaluations / max(self.evaluations, 1)
        return min(1.0, max(evaluated, seconds / max(self.seconds, 1e-9)))

    def part(self, evaluations: int, share: float) -> Self:
        """At most so many of the evaluations, and a share of the seconds."""
        return replace(
            self, seconds=share * self.seconds, evaluations=min(evaluations, self.evaluations)
        )

    def after(self, spent: Spent) -> Self:
        """What is left after a search."""
        return replace(
            self,
            seconds=max(0.0, self.seconds - spent.seconds),
            evaluations=max(0, self.evaluations - spent.evaluations),
        )


@dataclass(frozen=True, slots=True)
class Budget(Limits):
    """The limits of a planner, and who is told.

    Args:
        told: Told of each improvement, so that a search that is killed has not searched for
            nothing. A planner that runs several searches may tell of a plan that is worse than an
            earlier one.
    """

    told: Listener | None = field(default=None, compare=False)


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
        idle: Devices of the cluster that the plan does not use.
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
    idle: tuple[int, ...] = ()


def best_of(results: Sequence[PlannerResult]) -> PlannerResult:
    """The feasible result with the least step time; the least overfull one if none fits."""
    return min(
        results,
        key=lambda r: (
            r.plan is None,
            r.overflow if r.estimate is not None else float("inf"),
            r.estimate.step_time if r.estimate is not None else float("inf"),
        ),
    )


def joined(results: Sequence[PlannerResult]) -> PlannerResult:
    """Searches of one instance, one after the other, as one: the best plan, and what all spent."""
    curve: list[tuple[float, float]] = []
    before = 0.0
    for result in results:
        for seconds, step_time in result.curve:
            if not curve or step_time < curve[-1][1]:
                curve.append((before + seconds, step_time))
        before += result.seconds
    return replace(
        best_of(results),
        evaluations=sum(result.evaluations for result in results),
        seconds=before,
        stopped=results[-1].stopped,
        curve=tuple(curve),
    )


class Planner(Protocol):
    """Anything that turns an instance into a plan."""

    def __call__(
        self,
        instance: Instance,
        budget: Budget,
        rng: np.random.Generator,
        costing: Costing | None = None,
    ) -> PlannerResult:
        """The best plan within the budget; same seed, same plan.

        Args:
            instance: The question.
            budget: What the search may spend.
            rng: The source of all randomness.
            costing: How its plans are costed, where that is shared with another search or not the
                default; it is of the same instance.
        """
        ...
