"""How good planners are: gaps to the best known plan of each instance, as arrays."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from rlplace.errors import InputError
from rlplace.plan.types import Instance
from rlplace.planners.types import Budget, Planner
from rlplace.policies.types import DoubleArray

#: Called when an instance is done: its number, how many there are.
DoneHook = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Summary:
    """One planner over a suite: gaps are ln(step time / best known), times are seconds.

    Where nothing fits, an instance counts in `failed` and in no mean.
    """

    mean: float
    median: float
    worst: float
    seconds_mean: float
    seconds_worst: float
    failed: int


@dataclass(frozen=True)
class Comparison:
    """Planners on a suite of I instances.

    Args:
        names: P planners.
        step_times: (P, I) seconds; infinite where nothing was found that fits.
        seconds: (P, I): how long each planner took.
        best_known: (I,): the best step time of any planner, or a better one that was given.
    """

    names: tuple[str, ...]
    step_times: DoubleArray
    seconds: DoubleArray
    best_known: DoubleArray

    @property
    def gaps(self) -> DoubleArray:
        """(P, I): ln(step time / best known); infinite where nothing fits."""
        with np.errstate(invalid="ignore"):
            gaps: DoubleArray = np.log(self.step_times / self.best_known)
        return np.where(np.isnan(gaps), np.inf, gaps)

    def summary(self, name: str, chosen: Sequence[int] | None = None) -> Summary:
        """One planner over the suite, or over some of its instances (as the mixed clusters)."""
        row = self.names.index(name)
        columns = np.arange(self.gaps.shape[1]) if chosen is None else np.asarray(chosen)
        gaps, seconds = self.gaps[row, columns], self.seconds[row, columns]
        fits = gaps[np.isfinite(gaps)]
        mean, median, worst = (
            (float(np.mean(fits)), float(np.median(fits)), float(np.max(fits)))
            if len(fits)
            else (math.inf, math.inf, math.inf)
        )
        failed = len(gaps) - len(fits)
        return Summary(mean, median, worst, float(seconds.mean()), float(seconds.max()), failed)


def compare(
    planners: Mapping[str, Planner],
    instances: Sequence[Instance],
    budget: Budget,
    seed: int,
    best_known: Sequence[float] | None = None,
    on_instance: DoneHook | None = None,
) -> Comparison:
    """Run every planner on every instance; each pair has its own random numbers.

    Args:
        planners: By the name that the table shows.
        instances: The suite.
        budget: Of each planner on each instance.
        seed: Same seed, same plans.
        best_known: Step times known from elsewhere, one an instance.
        on_instance: For progress.

    Raises:
        InputError: If there is nothing to compare.
    """
    if not planners or not instances:
        raise InputError("planners, instances", 0, "a comparison needs at least one of each", 1)
    shape = (len(planners), len(instances))
    step_times, seconds = np.full(shape, np.inf), np.zeros(shape)
    for column, instance in enumerate(instances):
        for row, planner in enumerate(planners.values()):
            rng = np.random.default_rng((seed, column))
            result = planner(instance, budget, rng)
            seconds[row, column] = result.seconds
            if result.plan is not None and result.estimate is not None:
                step_times[row, column] = result.estimate.step_time
        if on_instance is not None:
            on_instance(column + 1, len(instances))
    known = step_times.min(axis=0)
    if best_known is not None:
        known = np.minimum(known, np.asarray(best_known, dtype=np.float64))
    return Comparison(tuple(planners), step_times, seconds, known)
