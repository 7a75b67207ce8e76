"""What all planners share: the best plan so far, the budget, and the result."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from math import log

from rlplace.plan.types import Instance, Plan
from rlplace.planners.costing import Costing
from rlplace.planners.types import Budget, PlannerResult
from rlplace.simulate.types import Estimate


@dataclass
class Search:
    """Keeps the best plan that was offered; at any moment `result` is what was found so far.

    Args:
        name: Name of the planner.
        costing: Of the instance.
        budget: What it may spend.
    """

    name: str
    costing: Costing
    budget: Budget
    best: tuple[Plan, Estimate] | None = None
    overfull: tuple[Plan, Estimate] | None = None
    _started: float = field(default_factory=time.perf_counter)
    _curve: list[tuple[float, float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._spent_before = self.costing.estimator.evaluations

    @property
    def evaluations(self) -> int:
        """Plans estimated by this search."""
        return self.costing.estimator.evaluations - self._spent_before

    @property
    def stopped(self) -> str | None:
        """Which part of the budget has run out, or None."""
        return self.budget.run_out(time.perf_counter() - self._started, self.evaluations)

    @property
    def progress(self) -> float:
        """Share of the budget that is spent, 0 to 1, whichever part is nearer to its end."""
        return self.budget.progress(time.perf_counter() - self._started, self.evaluations)

    def over(self, last: bool) -> bool:
        """Whether a pass over the plans ends here: the budget has run out, and there is an answer.

        Args:
            last: Whether no pass follows, so that one plan is estimated in any case.
        """
        return self.stopped is not None and (not last or self.evaluations > 0)

    def offer(self, plan: Plan) -> Estimate:
        """Estimate a legal plan and remember it if it is the best so far."""
        estimate = self.costing.estimator.estimate(plan)
        if not estimate.feasible:
            instance = self.costing.instance
            over = overflow(instance, estimate)
            if self.overfull is None or over < overflow(instance, self.overfull[1]):
                self.overfull = (plan, estimate)
        elif self.best is None or estimate.step_time < self.best[1].step_time:
            self.best = (plan, estimate)
            seconds = time.perf_counter() - self._started
            self._curve.append((seconds, estimate.step_time))
            if self.budget.told is not None:
                self.budget.told(plan, estimate, seconds)
        return estimate

    def result(self) -> PlannerResult:
        """What was found so far."""
        plan, estimate = self.best or (None, self.overfull[1] if self.overfull else None)
        missed = self.overfull if plan is None else None
        devices = range(len(self.costing.instance.cluster.devices))
        used = set(plan.devices) if plan is not None else set(devices)
        return PlannerResult(
            plan=plan,
            estimate=estimate,
            planner=self.name,
            evaluations=self.evaluations,
            seconds=time.perf_counter() - self._started,
            stopped=self.stopped or "done",
            curve=tuple(self._curve),
            overfull=missed[0] if missed else None,
            overflow=overflow(self.costing.instance, missed[1]) if missed else 0.0,
            idle=tuple(device for device in devices if device not in used),
        )


def overflow(instance: Instance, estimate: Estimate) -> float:
    """How far the fullest device is over its limit, as a share of the limit; 0 where all fits."""
    shares = (
        peak / instance.memory_limit(device) - 1.0
        for device, peak in enumerate(estimate.peak_memory)
    )
    return max(0.0, *shares)


def objective(instance: Instance, estimate: Estimate) -> float:
    """What local search minimises: log step time, plus a price in proportion to the overflow."""
    return log(estimate.step_time) + 4.0 * overflow(instance, estimate)
