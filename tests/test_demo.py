from __future__ import annotations

import json
from pathlib import Path

import pytest

import rlplace
from rlplace.demo import DemoConfig, demo
from rlplace.runtime.measure import Measurement


@pytest.mark.dist
def test_the_demo_predicts_runs_and_draws(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = DemoConfig(model="gpt2-tiny", seq_len=32, ranks=(2,), steps=3, out=tmp_path)
    (result,) = demo(config)
    assert result.placed.estimate.feasible
    assert len(result.measured.step_times) == 3
    assert result.measured.losses[-1] > 0.0
    assert rlplace.Plan.load(tmp_path / "plan-2.json") == result.placed.plan
    assert Measurement.load(tmp_path / "measurement-2.json").step_times == (
        result.measured.step_times
    )
    assert (tmp_path / "timeline-2.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((tmp_path / "trace-2.json").read_text())["traceEvents"]
    assert "predicted and measured" in capsys.readouterr().out
