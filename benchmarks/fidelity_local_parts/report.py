"""How well predictions agree with what was measured here: scores and tables."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from rich.table import Table
from scipy.stats import kendalltau

from benchmarks.fidelity_local_parts.predict import Row
from benchmarks.fidelity_tables.metrics import MEMORY_WITHIN
from rlplace.simulate.types import most_held
from rlplace.units import MIB

#: Groups of fewer plans say nothing about an order.
LEAST_GROUP = 3


@dataclass(frozen=True)
class Score:
    """Predictions of some plans.

    Args:
        n: Plans that no constant was fitted to.
        median: Median of the absolute relative error of the step time.
        p90: Its 90th percentile.
        bias: Median of the signed relative error.
        tau: Kendall's tau of step times, mean over groups of one family and number of ranks.
        tau_all: Kendall's tau over all plans.
        regret: Measured time of the predicted best over the measured best - 1, median of groups.
        worst_regret: The largest.
        groups: Groups of at least `LEAST_GROUP` plans.
        memory_within: Share of plans whose memory is within `MEMORY_WITHIN`.
        memory_median: Median of the absolute relative error of the memory.
        noise: Median difference of two runs of a plan, as a share.
        others: Mean share of the cores that strangers used meanwhile.
    """

    n: int
    median: float
    p90: float
    bias: float
    tau: float
    tau_all: float
    regret: float
    worst_regret: float
    groups: int
    memory_within: float
    memory_median: float
    noise: float
    others: float


def score(rows: Sequence[Row]) -> Score:
    """The score of some rows; order and regret count the fitted ones too, errors do not."""
    own = [row for row in rows if not row.fitted]
    errors = np.array([row.error for row in own])
    memory = np.abs([row.memory_error for row in own])
    groups = [members for members in _groups(rows) if len(members) >= LEAST_GROUP]
    regrets = [regret(members) for members in groups] or [math.nan]
    return Score(
        n=len(own),
        median=float(np.median(np.abs(errors))),
        p90=float(np.percentile(np.abs(errors), 90)),
        bias=float(np.median(errors)),
        tau=float(np.mean([tau(members) for members in groups] or [math.nan])),
        tau_all=tau(own),
        regret=float(np.median(regrets)),
        worst_regret=max(regrets),
        groups=len(groups),
        memory_within=float(np.mean(memory <= MEMORY_WITHIN)),
        memory_median=float(np.median(memory)),
        noise=float(np.median([row.noise for row in own])),
        others=float(np.mean([run.others for row in own for run in row.record.runs])),
    )


def tau(rows: Sequence[Row]) -> float:
    """Kendall's tau-b of predicted and measured step times."""
    predicted = [row.estimate.step_time for row in rows]
    return float(kendalltau(predicted, [row.measured for row in rows]).statistic)


def regret(rows: Sequence[Row]) -> float:
    """Measured time of the predicted best, over the measured best, minus 1."""
    chosen = min(rows, key=lambda row: row.estimate.step_time)
    return chosen.measured / min(row.measured for row in rows) - 1.0


def _groups(rows: Sequence[Row]) -> list[list[Row]]:
    found: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        found[row.case.group].append(row)
    return list(found.values())


def score_table(scores: Mapping[str, Score]) -> Table:
    """One line a setting."""
    table = Table(title="plans that nothing was fitted to")
    for name in ("setting", "n", "median", "p90", "bias", "tau", "tau all", "regret", "worst"):
        table.add_column(name, justify="left" if name == "setting" else "right")
    for name in ("memory in 15 %", "two runs differ", "others"):
        table.add_column(name, justify="right")
    for name, own in scores.items():
        table.add_row(
            name,
            str(own.n),
            f"{own.median:.1%}",
            f"{own.p90:.1%}",
            f"{own.bias:+.1%}",
            f"{own.tau:.2f}",
            f"{own.tau_all:.2f}",
            f"{own.regret:.1%}",
            f"{own.worst_regret:.1%}",
            f"{own.memory_within:.0%}",
            f"{own.noise:.1%}",
            f"{own.others:.0%}",
        )
    return table


def plan_table(name: str, rows: Sequence[Row]) -> Table:
    """One line a plan."""
    table = Table(title=name)
    for column in (
        "plan",
        "predicted ms",
        "measured ms",
        "error",
        "runs",
        "MiB",
        "error",
        "fitted",
    ):
        table.add_column(column, justify="left" if column == "plan" else "right")
    for row in rows:
        table.add_row(
            row.case.name,
            f"{1e3 * row.estimate.step_time:.0f}",
            f"{1e3 * row.measured:.0f}",
            f"{row.error:+.1%}",
            f"{row.noise:.1%}",
            f"{most_held(row.estimate.memory) / MIB:.0f}",
            f"{row.memory_error:+.1%}",
            "yes" if row.fitted else "",
        )
    return table
