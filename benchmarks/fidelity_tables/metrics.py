"""How well estimates agree with measurements: pure functions of results."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.stats import kendalltau

from benchmarks.fidelity_tables.types import Result, Row

#: Rows below this share of the best throughput of their group are sick runs.
HEALTHY_SHARE = 0.5
#: Groups of fewer rows say nothing about an order.
LEAST_GROUP = 4
#: Memory counts as right within this share.
MEMORY_WITHIN = 0.15


@dataclass(frozen=True)
class TimeScore:
    """Step times of some rows.

    Args:
        n: Rows with a measured and an estimated time.
        median: Median of the absolute relative error.
        p90: Its 90th percentile.
        bias: Median of the signed relative error: above 0 where estimates are too long.
        tau: Kendall's tau of seconds a sample, median over groups.
        tau_mean: Its mean over groups, weighted by their rows.
        regret: Measured time of the predicted best over the measured best - 1, median over groups.
        groups: Groups of at least `LEAST_GROUP` rows.
    """

    n: int
    median: float
    p90: float
    bias: float
    tau: float
    tau_mean: float
    regret: float
    groups: int


@dataclass(frozen=True)
class MemoryScore:
    """Memory of some rows, and what is said to fit.

    Args:
        n: Rows with a measured and an estimated memory.
        within: Share of them within `MEMORY_WITHIN`.
        median: Median of the absolute relative error.
        bias: Median of the signed relative error.
        ran: Rows that ran.
        ran_feasible: Those of them that are said to fit.
        oom: Rows that ran out of memory.
        oom_infeasible: Those of them that are said not to fit.
    """

    n: int
    within: float
    median: float
    bias: float
    ran: int
    ran_feasible: int
    oom: int
    oom_infeasible: int


def time_error(result: Result) -> float:
    """Relative error of the step time, signed."""
    assert result.row.measured.step_time is not None
    return result.step_time / result.row.measured.step_time - 1.0


def memory_error(result: Result) -> float:
    """Relative error of the memory, signed."""
    assert result.row.measured.memory is not None
    return result.memory / result.row.measured.memory - 1.0


def timed(results: Iterable[Result]) -> list[Result]:
    """Results with a measured and an estimated step time."""
    return [r for r in results if not r.problem and r.row.measured.step_time is not None]


def weighed(results: Iterable[Result]) -> list[Result]:
    """Results with a measured and an estimated memory."""
    return [r for r in results if not r.problem and r.row.measured.memory is not None]


def healthy_lines(rows: Iterable[Row]) -> set[tuple[str, int]]:
    """(table, line) of the rows with at least half of the best throughput of their group."""
    groups: dict[tuple[str, ...], list[Row]] = defaultdict(list)
    for row in rows:
        if row.measured.step_time is not None:
            groups[(row.table, *row.group)].append(row)
    healthy: set[tuple[str, int]] = set()
    for members in groups.values():
        best = min(_seconds_a_sample(row) for row in members)
        good = (r for r in members if _seconds_a_sample(r) <= best / HEALTHY_SHARE)
        healthy.update((row.table, row.line) for row in good)
    return healthy


def time_score(results: Sequence[Result]) -> TimeScore | None:
    """The score of step times; None without any."""
    counted = timed(results)
    if not counted:
        return None
    errors = np.array([time_error(result) for result in counted])
    groups = _groups(counted)
    taus = [group_tau(members) for members in groups]
    known = [(tau, len(m)) for tau, m in zip(taus, groups, strict=True) if not math.isnan(tau)]
    weights = sum(size for _, size in known)
    return TimeScore(
        n=len(counted),
        median=float(np.median(np.abs(errors))),
        p90=float(np.percentile(np.abs(errors), 90)),
        bias=float(np.median(errors)),
        tau=float(np.median([tau for tau, _ in known])) if known else math.nan,
        tau_mean=sum(tau * size for tau, size in known) / weights if known else math.nan,
        regret=float(np.median([group_regret(m) for m in groups])) if groups else math.nan,
        groups=len(groups),
    )


def memory_score(results: Sequence[Result]) -> MemoryScore:
    """The score of memory, and the confusion of what ran with what fits."""
    counted = weighed(results)
    errors = np.array([memory_error(result) for result in counted])
    judged = [result for result in results if not result.problem]
    ran = [result.feasible for result in judged if result.row.measured.ran]
    oom = [not result.feasible for result in judged if result.row.measured.ran is False]
    none = not counted
    return MemoryScore(
        n=len(counted),
        within=math.nan if none else float(np.mean(np.abs(errors) <= MEMORY_WITHIN)),
        median=math.nan if none else float(np.median(np.abs(errors))),
        bias=math.nan if none else float(np.median(errors)),
        ran=len(ran),
        ran_feasible=sum(ran),
        oom=len(oom),
        oom_infeasible=sum(oom),
    )


def group_tau(members: Sequence[Result]) -> float:
    """Kendall's tau-b of predicted and measured seconds a sample; NaN if one is constant."""
    predicted = [result.step_time / result.row.workload.global_batch for result in members]
    measured = [_seconds_a_sample(result.row) for result in members]
    return float(kendalltau(predicted, measured).statistic)


def group_regret(members: Sequence[Result]) -> float:
    """Measured seconds a sample of the predicted best, over the measured best, minus 1."""
    chosen = min(members, key=lambda r: r.step_time / r.row.workload.global_batch)
    best = min(_seconds_a_sample(result.row) for result in members)
    return _seconds_a_sample(chosen.row) / best - 1.0


def _groups(results: Iterable[Result]) -> list[list[Result]]:
    found: dict[tuple[str, ...], list[Result]] = defaultdict(list)
    for result in results:
        found[(result.row.table, *result.row.group)].append(result)
    return [members for members in found.values() if len(members) >= LEAST_GROUP]


def _seconds_a_sample(row: Row) -> float:
    assert row.measured.step_time is not None
    return row.measured.step_time / row.workload.global_batch
