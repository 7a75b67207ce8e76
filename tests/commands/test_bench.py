"""``rlplace bench`` from the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlplace.cli import OK
from rlplace.commands.bench import bench
from rlplace.errors import InputError
from rlplace.policies.tracking import Tracker


def _bench(folder: Path, **options: object) -> int:
    planner = ["exhaustive", "dynamic", "policy"]
    given = {"planner": planner, "count": 2, "evaluations": 3000, "seconds": 60.0, **options}
    return bench(["tiny"], out=folder / "results.jsonl", **given)  # type: ignore[arg-type]  # any


def test_planners_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "planners.md"
    assert _bench(tmp_path, json=True, curves=tmp_path / "curves.png", markdown=page) == OK
    found = json.loads(capsys.readouterr().out)
    rows = {row["planner"]: row for row in found["standings"]}
    assert list(rows) == ["exhaustive", "dynamic", "policy"]
    assert rows["exhaustive"]["mean"] == 0.0
    assert all(row["infeasible"] == 0.0 and row["worst"] >= 0.0 for row in rows.values())
    assert (tmp_path / "curves.png").stat().st_size > 10_000
    asked = "--planner exhaustive dynamic policy --count 2 --seconds 60.0 --evaluations 3000"
    assert f"    rlplace bench tiny {asked} --seed 0 --markdown {page}\n" in page.read_text()
    results = (tmp_path / "results.jsonl").read_text()
    assert len(results.splitlines()) == 6
    assert _bench(tmp_path) == OK
    assert (tmp_path / "results.jsonl").read_text() == results, "nothing was run again"
    shown = capsys.readouterr().out
    assert "tiny, 2 problems" in shown
    assert "policy" in shown


def test_the_table_goes_to_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    logged: list[tuple[list[str], list[list[object]]]] = []
    table = Tracker.table

    def watched(self: Tracker, name: str, columns: list[str], rows: list[list[object]]) -> None:
        logged.append((columns, rows))
        table(self, name, columns, rows)  # type: ignore[arg-type]  # cells of any type

    monkeypatch.setattr(Tracker, "table", watched)
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert _bench(tmp_path, planner=["grid"], track=True) == OK
    ((columns, rows),) = logged
    assert columns[:2] == ["suite", "planner"]
    assert rows[0][:2] == ["tiny", "grid"]
    assert list(tmp_path.glob("wandb/offline-run-*"))


def test_an_unknown_planner_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="dynamic"):
        _bench(tmp_path, planner=["dynamics"])
