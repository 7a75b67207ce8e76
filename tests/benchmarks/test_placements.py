"""The table of placers: when a target counts as reached, and what stands in a row."""

from __future__ import annotations

from benchmarks.placements import Row, pipelines
from rlplace.bench.public import BERT
from rlplace.planners.types import Limits
from tests.graph.formats.examples import shared


def test_a_target_is_reached_by_what_rounds_to_it() -> None:
    assert Row("g", "best", 33.77469, 0.1, target=33.7747).met is True
    assert Row("g", "best", 33.7747 * (1 + 5e-6), 0.1, target=33.7747).met is True
    assert Row("g", "best", 33.78, 0.1, target=33.7747).met is False
    assert Row("g", "best", 33.78, 0.1).met is None
    row = Row("g", "best", 33.78, 0.125, published=40.0, target=33.7747)
    assert row.cells == ("g", "best", "33.78", "40", "33.775", "", "NO", "0.12")


def test_rows_of_piper_are_between_bound_and_target() -> None:
    rows = list(pipelines(shared("piper_graphs.json").parent, Limits(evaluations=60)))
    assert len(rows) == 4
    assert all(row.bound is not None and row.bound <= row.ours for row in rows)
    assert [row.met for row in rows if row.problem == BERT] == [True]
