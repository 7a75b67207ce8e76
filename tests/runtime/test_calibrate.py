"""Tests of calibrating on measured runs that a file lists."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from rlplace.cluster.types import Cluster
from rlplace.cost.calibration_file import load
from rlplace.cost.constants import apply
from rlplace.cost.measured import Measured, percentile_error
from rlplace.errors import InputError
from rlplace.graph import library
from rlplace.plan.types import Instance
from rlplace.plan.uniform import uniform_plan
from rlplace.runtime.calibrate import calibrate, read_measured
from rlplace.runtime.measure import Measurement
from rlplace.simulate.predict import predict

NAME = "kind.H100-80.memory_efficiency"


def instance() -> Instance:
    """A small model on one node."""
    return Instance(library.build("dlrm"), Cluster.parse("4xH100-80"), 65536)


def rows(count: int) -> list[Measured]:
    """Plans that a card with half of the memory efficiency would run."""
    asked = instance()
    plans = [uniform_plan(asked, micro_batches=2**power) for power in range(count)]
    truth = apply(asked, {NAME: 0.4})
    real = predict([Measured(truth, plan, 1.0) for plan in plans])
    return [Measured(asked, plan, real[index][0]) for index, plan in enumerate(plans)]


def test_rows_are_fitted_and_the_fit_is_kept(tmp_path: Path) -> None:
    out = tmp_path / "calibration.json"
    found = calibrate(rows(8), [NAME], out=out, note="a test", show=True)
    assert found.constants[NAME] == pytest.approx(0.4, rel=0.02)
    assert (len(found.fitted), len(found.held_out)) == (6, 2)
    assert percentile_error(found.held_out) < 0.01
    assert load(out)[NAME] == pytest.approx(0.4, rel=0.02)
    assert calibrate(rows(4), [NAME]).band_rows == "fitted"


def test_a_list_of_runs_is_read(tmp_path: Path) -> None:
    first, second = rows(2)
    first.plan.save(tmp_path / "plan.json")
    Measurement((0.5, 0.7, 0.6), 1, (), ()).save(tmp_path / "run.json")
    entries = [
        {"plan": "plan.json", "cluster": "4xH100-80", "measurement": "run.json", "name": "first"},
        {"plan": "plan.json", "cluster": "8xH100-80", "step_time": 0.25, "peak_memory": 1e9},
    ]
    path = tmp_path / "runs.json"
    path.write_text(json.dumps(entries))
    found = read_measured(path)
    assert [row.step_time for row in found] == [0.6, 0.25]
    assert [row.name for row in found] == ["first", "runs.json[1]"]
    assert found[1].peak_memory == 1e9
    assert found[0].plan == first.plan
    assert found[0].instance.graph is found[1].instance.graph
    assert found[0].instance.graph == second.instance.graph


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"plan": "plan.json", "cluster": "4xH100-80", "seconds": 1.0}, "a run has plan"),
        ({"plan": "plan.json", "step_time": 1.0}, "names its plan and cluster"),
        ({"plan": "plan.json", "cluster": "4xH100-80"}, "neither"),
        ({"plan": "plan.json", "cluster": "2xH100-80", "step_time": 1.0}, "has 2 devices"),
        ({"plan": "own.json", "cluster": "4xH100-80", "step_time": 1.0}, "which model"),
        ({"plan": "none.json", "cluster": "4xH100-80", "step_time": 1.0}, "cannot be read"),
    ],
)
def test_what_is_wrong_with_a_run_is_said(
    tmp_path: Path, entry: dict[str, object], message: str
) -> None:
    plan = rows(1)[0].plan
    plan.save(tmp_path / "plan.json")
    replace(plan, source={}).save(tmp_path / "own.json")
    path = tmp_path / "runs.json"
    path.write_text(json.dumps([entry]))
    with pytest.raises(InputError, match=message):
        read_measured(path)


@pytest.mark.parametrize("content", ["{", "{}", "[1]"])
def test_what_is_no_list_of_runs_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "runs.json"
    path.write_text(content)
    with pytest.raises(InputError, match="measurements"):
        calibrate(path, [NAME])
    with pytest.raises(InputError, match="cannot be read"):
        calibrate([tmp_path / "none.json"], [NAME])
