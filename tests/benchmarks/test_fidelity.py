"""The command line of the fidelity benchmark."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import fidelity
from benchmarks.fidelity_tables.read import data_folder
from benchmarks.fidelity_tables.types import GraphSpec
from tests.benchmarks.results import result


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", ["fidelity.py", *arguments])
    fidelity.main()


def test_a_table_that_is_absent_is_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RLPLACE_DATA", str(tmp_path))
    run(monkeypatch, "--table", "nanotron")
    shown = " ".join(capsys.readouterr().out.split())
    assert "nanotron: skipped, there is no nanotron_ultrascale.csv" in shown
    assert "0 rows" in shown


def test_few_graphs_are_those_of_most_rows() -> None:
    rows = [result(line=line).row for line in range(3)]
    other = replace(rows[0].workload, graph=GraphSpec("llama", ()))
    mixed = [*rows, replace(rows[0], line=9, workload=other)]
    assert fidelity.of_few_graphs(mixed, 1) == rows
    assert fidelity.of_few_graphs(mixed, None) == mixed


def test_a_table_is_estimated_and_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = data_folder() / "alpa_repro_v100_32.csv"
    if not source.exists():
        pytest.skip(f"there is no {source}")
    header, *lines = source.read_text().splitlines()
    chosen = [line for line in lines if "cut to 4 layers" in line and ",none," in line][:3]
    (tmp_path / source.name).write_text("\n".join([header, *chosen]))
    out = tmp_path / "out"
    run(
        monkeypatch,
        *("--data", str(tmp_path), "--table", "alpa_repro", "--json", str(out / "scores.json")),
        *("--residuals", str(out / "rows.csv"), "--plots", str(out)),
    )
    score = json.loads((out / "scores.json").read_text())["alpa_repro"]
    assert score["rows"] == 3
    assert score["problems"] == {}
    assert len(score["fit_lines"]) == 1
    assert score["all"]["n"] == 2
    assert 0.0 <= score["all"]["median"] < 1.0
    assert score["memory"]["n"] == 2
    lines = (out / "rows.csv").read_text().splitlines()
    assert len(lines) == 4
    assert "time_error" in lines[0]
    assert (out / "alpa_repro-time.png").stat().st_size > 1000
    assert (out / "alpa_repro-memory.png").exists()
