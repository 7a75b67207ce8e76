"""Any-time curves: how far from the best known plan each planner is, over the seconds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from rlplace.bench.standings import best_known
from rlplace.bench.types import Trial

Floats = npt.NDArray[np.float64]
_POINTS = 120


def mean_gaps(trials: Sequence[Trial], planner: str, at: Floats) -> tuple[Floats, Floats]:
    """Mean gap to the best known step time at some seconds, and on which share there is a plan.

    Args:
        trials: Of all planners on one suite.
        planner: Which planner.
        at: Seconds, ascending.

    Returns:
        Mean of step time / best known - 1 over the problems with a plan (NaN where there is none),
        and the share of the problems that have one, both of the shape of `at`.
    """
    best = best_known(trials)
    own = [
        t for t in trials if t.key.planner == planner and (t.key.suite, t.key.fingerprint) in best
    ]
    gaps = np.full((max(len(own), 1), len(at)), math.nan)
    for row, trial in enumerate(own):
        known = best[trial.key.suite, trial.key.fingerprint]
        for seconds, step_time in trial.curve:
            gaps[row, at >= seconds] = step_time / known - 1.0
    have = ~np.isnan(gaps)
    count = have.sum(axis=0)
    total = np.where(have, gaps, 0.0).sum(axis=0)
    with np.errstate(invalid="ignore"):
        return total / count, count / max(len(own), 1)


def draw_curves(trials: Sequence[Trial], path: Path) -> None:
    """Draw a panel for each suite (PNG, SVG or PDF)."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    suites = list(dict.fromkeys(trial.key.suite for trial in trials))
    figure = Figure(figsize=(7.0, 3.6 * len(suites)), layout="constrained")
    FigureCanvasAgg(figure)
    for row, suite in enumerate(suites):
        own = [trial for trial in trials if trial.key.suite == suite]
        ends = [seconds for trial in own for seconds, _ in trial.curve]
        at = np.geomspace(max(min(ends, default=1e-3), 1e-4), max(ends, default=1.0), _POINTS)
        panel = figure.add_subplot(len(suites), 1, row + 1)
        for planner in dict.fromkeys(trial.key.planner for trial in own):
            panel.plot(at, 100 * mean_gaps(own, planner, at)[0], label=planner)
        panel.set(xscale="log", xlabel="seconds", ylabel="% over the best known", title=suite)
        panel.set_yscale("symlog", linthresh=0.1)
        panel.set_ylim(bottom=0.0)
        panel.legend(fontsize="small")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
