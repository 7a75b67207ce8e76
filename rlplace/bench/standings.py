"""How planners did: gaps to the best known plan and to the bound, and what they cost."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from rich.table import Table

from rlplace.bench.types import Trial

#: Columns of the table, all within 80 characters: field, head, and how it is printed.
_COLUMNS = (
    ("mean", "mean", "{:.2%}"),
    ("median", "median", "{:.2%}"),
    ("worst", "worst", "{:.1%}"),
    ("to_bound", "bound", "{:.0%}"),
    ("infeasible", "none", "{:.0%}"),
    ("seconds", "s", "{:.2f}"),
    ("worst_seconds", "s max", "{:.1f}"),
    ("cpu_seconds", "CPU s", "{:.2f}"),
    ("evaluations", "plans", "{:.0f}"),
    ("failed", "failed", "{}"),
)


@dataclass(frozen=True, slots=True)
class Standing:
    """One planner on one suite.

    Args:
        suite: The suite.
        planner: The planner.
        problems: On how many problems some planner found a plan that fits.
        mean, median, worst: Step time / best known - 1, over those on which it found one.
        to_bound: Mean of step time / bound - 1; NaN where there are no bounds.
        infeasible: Share of `problems` on which it found none.
        seconds, worst_seconds: Wall seconds, mean and worst.
        cpu_seconds: CPU seconds, mean.
        evaluations: Mean.
        failed: Trials that raised an error or were killed.
    """

    suite: str
    planner: str
    problems: int
    mean: float
    median: float
    worst: float
    to_bound: float
    infeasible: float
    seconds: float
    worst_seconds: float
    cpu_seconds: float
    evaluations: float
    failed: int


def best_known(trials: Iterable[Trial]) -> dict[tuple[str, str], float]:
    """The least step time that any trial found, by (suite, fingerprint of the problem)."""
    best: dict[tuple[str, str], float] = {}
    for trial in trials:
        if trial.step_time is not None:
            problem = (trial.key.suite, trial.key.fingerprint)
            best[problem] = min(best.get(problem, math.inf), trial.step_time)
    return best


def standings(trials: Sequence[Trial]) -> list[Standing]:
    """The standing of each planner on each suite, in the order of the trials."""
    best = best_known(trials)
    places = dict.fromkeys((trial.key.suite, trial.key.planner) for trial in trials)
    return [
        _standing(
            suite,
            planner,
            [t for t in trials if (t.key.suite, t.key.planner) == (suite, planner)],
            best,
        )
        for suite, planner in places
    ]


def _standing(
    suite: str, planner: str, own: Sequence[Trial], best: dict[tuple[str, str], float]
) -> Standing:
    solvable = [t for t in own if (suite, t.key.fingerprint) in best]
    fits = [t for t in solvable if t.step_time is not None]
    times = np.array([t.step_time for t in fits], dtype=float)
    gaps = times / np.array([best[suite, t.key.fingerprint] for t in fits]) - 1.0
    bounds = np.array([math.nan if t.bound is None else t.bound for t in fits], dtype=float)
    mean, median, worst = (
        (float(gaps.mean()), float(np.median(gaps)), float(gaps.max()))
        if len(fits)
        else (math.nan,) * 3
    )
    return Standing(
        suite,
        planner,
        len(solvable),
        mean,
        median,
        worst,
        float((times / bounds - 1.0).mean()) if len(fits) else math.nan,
        1.0 - len(fits) / len(solvable) if solvable else math.nan,
        float(np.mean([t.seconds for t in own])),
        max(t.seconds for t in own),
        float(np.mean([t.cpu_seconds for t in own])),
        float(np.mean([t.evaluations for t in own])),
        sum(t.stopped in ("failed", "killed") for t in own),
    )


def standings_data(found: Sequence[Standing]) -> list[dict[str, Any]]:
    """What `rlplace bench --json` prints: NaN as null."""
    return [
        {
            key: None if isinstance(value, float) and math.isnan(value) else value
            for key, value in asdict(one).items()
        }
        for one in found
    ]


def render_standings(found: Sequence[Standing]) -> list[Table]:
    """A table a suite."""
    tables = []
    for suite in dict.fromkeys(one.suite for one in found):
        own = [one for one in found if one.suite == suite]
        title = f"{suite}, {max(one.problems for one in own)} problems"
        table = Table(header_style="bold", box=None, pad_edge=False, title=title)
        table.add_column("planner")
        for _, head, _ in _COLUMNS:
            table.add_column(head, justify="right", no_wrap=True)
        for one in own:
            cells = [text.format(getattr(one, name)) for name, _, text in _COLUMNS]
            table.add_row(one.planner, *cells)
        tables.append(table)
    return tables
