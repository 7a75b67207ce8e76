"""The page of a comparison, worked out by hand."""

from __future__ import annotations

import math

from rlplace.bench.markdown import page
from rlplace.bench.planners import planners
from rlplace.bench.standings import Standing

_GRID, _DAPPLE = "`grid`", "`dapple`"


def _standing(suite: str, planner: str, *gaps: float, none: float, problems: int) -> Standing:
    median, mean, worst = gaps
    return Standing(
        suite, planner, problems, mean, median, worst, 0.0, none, 9.0, 9.0, 0.5, 10.0, 0
    )


def _rows(text: str, heading: str) -> dict[str, list[str]]:
    """Cells of the table behind a heading, by the first of a line."""
    lines = text.partition(heading)[2].partition("\n## ")[0].splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if "|" in line]
    return {first: rest for first, *rest in cells}


def test_a_page_tells_gaps_and_what_planners_are() -> None:
    nan = math.nan
    found = [
        _standing("tiny", "grid", 0.01, 0.02, 0.5, none=0.0, problems=30),
        _standing("tiny", "dapple", nan, nan, nan, none=1.0, problems=30),
        _standing("real", "grid", 0.1, 0.2, 2.0, none=0.4, problems=10),
    ]
    text = page(found, planners(["grid", "dapple"]), "rlplace bench tiny real")
    assert "    rlplace bench tiny real\n" in text
    assert "the optimum" not in text, "nobody looked at every plan"
    gaps = _rows(text, "# Planners side by side")
    assert gaps["planner"] == ["tiny (30)", "real (10)", "none", "s"]
    assert gaps[_GRID] == ["1.0 / 2.0 / 50.0", "10.0 / 20.0 / 200.0", "10%", "0.50"]
    assert gaps[_DAPPLE] == ["-", "", "100%", "0.50"]
    told = _rows(text, "## What they are")
    assert "arXiv 2007.01045" in told[_DAPPLE][0]
    assert told[_GRID][1].startswith("every pp x tp x dp")


def test_who_has_looked_at_every_plan_gives_the_optimum() -> None:
    found = [_standing("tiny", "exhaustive", 0.0, 0.0, 0.0, none=0.0, problems=3)]
    assert "the optimum" in page(found, planners(["exhaustive"]), "")
