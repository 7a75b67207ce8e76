"""Tests of the file of calibrated constants."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlplace.cost.calibration_file import load, provenance, save
from rlplace.cost.measured import Calibration, Residual
from rlplace.errors import InputError
from rlplace.resources import resource

FIT = Calibration(
    constants={"kind.card.max_efficiency": 0.712345, "framework.own.launch": 1.5e-5},
    errors={"kind.card.max_efficiency": 0.01, "framework.own.launch": 0.02},
    before={"kind.card.max_efficiency": 0.6, "framework.own.launch": 0.0, "link.ib.latency": 1e-5},
    undetermined={"link.ib.latency": "no prediction moves"},
    fitted=(Residual("a", "step_time", 1.0, 1.5, 1.1), Residual("b", "step_time", 1.0, 1.2, 1.0)),
    held_out=(Residual("c", "step_time", 2.0, 3.0, 2.5),),
    band=(0.8, 0.8),
    band_rows="held out",
    frameworks=("own",),
    date="2026-01-31",
)


def test_constants_come_back(tmp_path: Path) -> None:
    path = tmp_path / "calibration.json"
    save(FIT, path, "two rows")
    assert load(path) == {"kind.card.max_efficiency": 0.7123, "framework.own.launch": 1.5e-5}
    content = json.loads(path.read_text())
    assert content["frameworks"]["own"] == {"launch": 1.5e-5, "band": [0.8, 0.8]}
    assert content["kinds"] == {"card": {"max_efficiency": 0.7123}}


def test_a_second_fit_is_added(tmp_path: Path) -> None:
    path = tmp_path / "calibration.json"
    save(FIT, path, "first")
    second = Calibration({"kind.card.max_efficiency": 0.5, "link.ib.latency": 2e-5}, {}, {}, {}, ())
    save(second, path, "second")
    found = load(path)
    assert found["kind.card.max_efficiency"] == 0.5
    assert found["link.ib.latency"] == 2e-5
    assert found["framework.own.launch"] == 1.5e-5
    fits = json.loads(path.read_text())["fits"]
    assert [entry["note"] for entry in fits] == ["first", "second"]


def test_provenance_says_what_and_how_well() -> None:
    found = provenance(FIT, "two rows")
    assert (found["date"], found["note"], found["rows"]) == ("2026-01-31", "two rows", 2)
    assert found["median_error_before"] == pytest.approx(0.35)
    assert found["median_error"] == pytest.approx(0.05)
    assert (found["rows_held_out"], found["median_error_held_out"]) == (1, pytest.approx(0.25))
    assert found["band_of"] == "held out rows"
    assert found["undetermined"] == {"link.ib.latency": "no prediction moves"}
    assert provenance(Calibration({}, {}, {}, {}, ()))["median_error"] is None


@pytest.mark.parametrize("content", ["{", "[]", '{"format": 2}'])
def test_what_is_not_such_a_file_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "other.json"
    path.write_text(content)
    with pytest.raises(InputError, match="calibration file"):
        load(path)
    with pytest.raises(InputError, match="calibration file"):
        save(FIT, path)
    assert path.read_text() == content
    with pytest.raises(InputError, match="cannot be read"):
        load(tmp_path / "none.json")


def test_the_shipped_file_is_one() -> None:
    assert all(value >= 0.0 for value in load(resource("configs/calibration.json")).values())
