"""How the time to plan is measured, and what is drawn of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.scaling import Row, draw, lines_of, question, row_of, sweeps
from rlplace.bench.planners import planners
from rlplace.plan.uniform import layer_keys

_ROW = Row("layers", "grid", "5b", 12, 64, 0.5, 10, 1, 2.0, "done")


def test_layers_grow_on_64_devices_and_devices_under_80_layers() -> None:
    asked = list(sweeps((12, 24), (8, 32)))
    assert asked == [
        ("layers", ("5b", 12, 64)),
        ("layers", ("5b", 24, 64)),
        ("devices", ("5b", 80, 8)),
        ("devices", ("5b", 80, 32)),
        ("devices", ("70b", 80, 32)),
    ]


@pytest.mark.parametrize("devices", [4, 8, 16])
def test_a_question_has_so_many_devices_and_layers(devices: int) -> None:
    instance = question("5b", 2, devices)
    assert len(instance.cluster.devices) == devices
    assert instance.global_batch == 16 * devices
    assert len({key for key in layer_keys(instance.graph) if key}) == 2


def test_a_row_tells_what_was_found() -> None:
    (planner,) = planners(["grid"]).values()
    row = row_of("devices", "grid", planner, ("5b", 2, 4), 60.0)
    assert row == replace(
        row, sweep="devices", planner="grid", model="5b", layers=2, devices=4, stopped="done"
    )
    assert row.seconds > 0.0
    assert row.evaluations > 1
    assert row.step_time is not None


def test_lines_are_of_one_sweep_a_planner_and_a_model(tmp_path: Path) -> None:
    rows = [
        _ROW,
        replace(_ROW, layers=24, seconds=0.75),
        replace(_ROW, sweep="devices", devices=8),
        replace(_ROW, sweep="devices", devices=8, model="70b", seconds=3.0),
    ]
    assert lines_of(rows, "layers") == {"grid, 5b": ([12, 24], [0.5, 0.75])}
    assert lines_of(rows, "devices") == {"grid, 5b": ([8], [0.5]), "grid, 70b": ([8], [3.0])}
    draw(rows, tmp_path / "new" / "scaling.png")
    assert (tmp_path / "new" / "scaling.png").read_bytes().startswith(b"\x89PNG")
