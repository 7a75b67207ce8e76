"""Scores of a table as plain data, and the file of residuals."""

import csv
from collections import Counter
from pathlib import Path

import pytest

from benchmarks.fidelity_tables.report import (
    memory_table,
    notes,
    residual,
    scores,
    time_table,
    write_residuals,
)
from benchmarks.fidelity_tables.types import Reading, Result
from tests.benchmarks.results import result


@pytest.fixture
def results() -> list[Result]:
    return [
        result(1.0, 1.1, line=1, memory=(4.0, 5.0)),
        result(4.0, 1.0, line=2),
        result(1.0, 3.0, line=3, fit=True),
        result(1.0, line=4, problem="uniform_plan has no cp"),
    ]


def test_fit_rows_and_sick_rows_stand_apart(results: list[Result]) -> None:
    reading = Reading([r.row for r in results], Counter({"suspect": 2}))
    score = scores(results, reading)
    assert score["healthy"]["n"] == 1
    assert score["healthy"]["median"] == pytest.approx(0.1)
    assert score["all"]["n"] == 2
    assert score["fitted"]["n"] == 1
    assert score["fit_lines"] == [3]
    assert score["problems"] == {"uniform_plan has no cp": 1}
    assert score["left_out"] == {"suspect": 2}
    said = "\n".join(notes("t", score))
    assert "1 fit rows, lines 3" in said
    assert "left out, suspect: 2" in said


def test_tables_show_percents(results: list[Result]) -> None:
    found = {"t": scores(results, Reading([r.row for r in results]))}
    assert [next(iter(column.cells)) for column in time_table(found).columns][:6] == [
        *("t", "healthy", "1", "10.0 %", "10.0 %", "10.0 %")
    ]
    assert [next(iter(column.cells)) for column in memory_table(found).columns] == [
        *("t", "1", "0.0 %", "25.0 %", "25.0 %", "2 / 2", "")
    ]


def test_residuals_hold_every_row(tmp_path: Path, results: list[Result]) -> None:
    write_residuals(tmp_path / "r.csv", results)
    with (tmp_path / "r.csv").open() as file:
        lines = list(csv.DictReader(file))
    assert len(lines) == 4
    assert float(lines[0]["time_error"]) == pytest.approx(0.1)
    assert lines[0]["plan_tp"] == "2"
    assert lines[0]["forward"] == "0.5"
    assert lines[3]["problem"] == "uniform_plan has no cp"
    assert lines[3]["time_error"] == ""
    assert residual(results[0])["memory_error"] == pytest.approx(0.25)
