"""What is imitated: the best decisions that a search among the builder's own decisions finds.

The search starts from what the policy proposes and then deviates: it goes back to a decision of
one of its best plans, takes another candidate, and lets the policy finish (limited discrepancy
search, Harvey and Ginsberg 1995, with random discrepancies). Plans found elsewhere, such as by
annealing, join where the builder can follow them.

Targets are the policy that led the search, improved: its probabilities times exp(-value /
tolerance), where a candidate's value is the best that was found behind it, and that of the
policy's own favourite where nothing was (completed values, Danihelka et al. 2022,
https://openreview.net/forum?id=bERaNdoegnO). So where the leader was right nothing is taught, and
ties are not broken by chance.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from rlplace.envs.types import FloatArray
from rlplace.policies.planner import Path, RolloutConfig, Rollouts, proposals
from rlplace.policies.types import DoubleArray, Recorder, Records

#: The value of a complete state, smaller is better: ln(step time) plus the price of overflow.
Objective = Callable[[Any], float]


@dataclass(frozen=True)
class TeacherConfig:
    """How long to search, and what of it becomes a target.

    Args:
        evaluations: Plans looked at for one instance.
        temperature: Of the deviating choices; above 1 it strays further than the policy would.
        elite: Best plans that are deviated from.
        batch: Deviations that are finished together.
        tolerance: A candidate's weight falls by 1/e for this much more of the objective.
        near: States of all plans within this of the best one are recorded, not only the best's.
    """

    evaluations: int = 200
    temperature: float = 3.0
    elite: int = 8
    batch: int = 8
    tolerance: float = 0.01
    near: float = 0.02


def search(
    rollouts: Rollouts, objective: Objective, config: TeacherConfig, extra: Iterable[Path] = ()
) -> dict[Path, float]:
    """Complete plans, as choices, with their values.

    Args:
        rollouts: The policy that leads the search, on one instance; its generator is used.
        objective: What a plan is worth.
        config: How long.
        extra: Plans found elsewhere.
    """
    found: dict[Path, float] = {}

    def evaluate(paths: Iterable[Path]) -> None:
        for path in paths:
            if path not in found:
                found[path] = objective(rollouts.state(path))

    evaluate(extra)
    opening = RolloutConfig(samples=min(config.evaluations // 4, 32))
    for paths in proposals(rollouts, opening):
        evaluate(paths)
    # Where all that is near has been seen, deviations repeat themselves: the rounds are limited.
    for _ in range(2 * config.evaluations // config.batch):
        if len(found) >= config.evaluations:
            break
        best = sorted(found, key=lambda path: (found[path], path))[: config.elite]
        starts = [_deviate(rollouts, best, config) for _ in range(config.batch)]
        evaluate(rollouts.run(starts, 0.0))
    return found


def records_of(rollouts: Rollouts, found: dict[Path, float], config: TeacherConfig) -> Records:
    """Every state on a plan that is near the best, with soft targets."""
    behind: dict[Path, float] = {}
    for path, value in found.items():
        for length in range(1, len(path) + 1):
            prefix = path[:length]
            behind[prefix] = min(value, behind.get(prefix, np.inf))
    best = min(found.values())
    near = sorted(path for path, value in found.items() if value <= best + config.near)
    recorder = Recorder(rollouts.builder.view(rollouts.state(())))
    for prefix in sorted({path[:length] for path in near for length in range(len(path))}):
        candidates = rollouts.builder.candidates(rollouts.state(prefix))
        values = np.full(len(candidates.mask), np.inf)
        for index in np.flatnonzero(candidates.mask):
            values[index] = behind.get((*prefix, int(index)), np.inf)
        # A state with one way on teaches nothing.
        if candidates.mask.sum() > 1:
            log_probs = rollouts.log_probs(prefix)
            recorder.add(candidates, len(prefix), _improved(log_probs, values, config.tolerance))
    return recorder.records()


def _deviate(rollouts: Rollouts, best: list[Path], config: TeacherConfig) -> Path:
    """The beginning of one of the best plans, with another last choice."""
    rng = rollouts.rng
    path = best[int(rng.integers(len(best)) * rng.random())]
    length = int(rng.integers(len(path)))
    log_probs = rollouts.log_probs(path[:length]) / config.temperature
    noisy = log_probs + rng.gumbel(size=log_probs.shape)
    if np.isfinite(log_probs).sum() > 1:
        noisy[path[length]] = -np.inf
    return (*path[:length], int(np.argmax(noisy)))


def _improved(log_probs: FloatArray, values: DoubleArray, tolerance: float) -> FloatArray:
    """Probabilities of the leader's improved policy; values are infinite where unknown."""
    known = np.isfinite(values)
    favourite = values[int(np.argmax(log_probs))]
    rest = favourite if np.isfinite(favourite) else values[known].max()
    scores = log_probs - np.where(known, values, rest) / tolerance
    weights: FloatArray = np.exp(scores - scores.max()).astype(np.float32)
    return weights
