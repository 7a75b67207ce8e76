"""Gaps, shares and curves, worked out by hand."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from rlplace.bench.curves import draw_curves, mean_gaps
from rlplace.bench.standings import best_known, render_standings, standings, standings_data
from rlplace.bench.types import Key, Trial


def _trial(planner: str, problem: str, step_time: float | None, seconds: float = 1.0) -> Trial:
    key = Key("s", problem, problem, planner, 10.0, 100, 0)
    curve = () if step_time is None else ((0.1, 2 * step_time), (seconds, step_time))
    return Trial(key, step_time, bound=0.5, seconds=seconds, evaluations=10, curve=curve)


_TRIALS = [
    _trial("good", "a", 1.0),
    _trial("good", "b", 2.2, seconds=3.0),
    _trial("good", "c", None),
    _trial("poor", "a", 1.5),
    _trial("poor", "b", 2.0),
    _trial("poor", "c", None),
    _trial("none", "a", None),
    _trial("none", "b", None),
]


def test_the_best_known_is_of_all_trials() -> None:
    assert best_known(_TRIALS) == {("s", "a"): 1.0, ("s", "b"): 2.0}


def test_standings() -> None:
    good, poor, none = standings(_TRIALS)
    assert (good.planner, good.suite, good.problems) == ("good", "s", 2)
    assert good.mean == pytest.approx(0.05)
    assert good.median == pytest.approx(0.05)
    assert good.worst == pytest.approx(0.1)
    assert good.to_bound == pytest.approx((1.0 + 3.4) / 2)
    assert good.seconds == pytest.approx(5.0 / 3)
    assert good.worst_seconds == 3.0
    assert poor.mean == pytest.approx(0.25)
    assert poor.infeasible == 0.0
    assert none.infeasible == 1.0
    assert math.isnan(none.mean)
    assert standings_data([none])[0]["mean"] is None


def test_the_table_has_a_row_a_planner() -> None:
    console = Console(width=80)
    with console.capture() as capture:
        console.print(*render_standings(standings(_TRIALS)))
    rows = [line.split() for line in capture.get().splitlines()]
    assert ["good", "5.00%", "5.00%", "10.0%"] in [row[:4] for row in rows]


def test_curves_start_with_the_first_plan_and_end_at_the_gap() -> None:
    gaps, share = mean_gaps(_TRIALS, "good", np.array([0.05, 0.5, 2.0, 4.0]))
    assert math.isnan(gaps[0])
    assert list(share) == [0.0, 1.0, 1.0, 1.0]
    assert gaps[1:] == pytest.approx([(1.0 + 1.2) / 2, (0.0 + 1.2) / 2, 0.05])


def test_curves_are_drawn(tmp_path: Path) -> None:
    draw_curves(_TRIALS, tmp_path / "more" / "curves.png")
    assert (tmp_path / "more" / "curves.png").read_bytes().startswith(b"\x89PNG")
