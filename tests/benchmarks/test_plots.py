"""Data of the scatter plots, and that they are drawn."""

from pathlib import Path

import pytest

from benchmarks.fidelity_tables.plots import draw, memory_scatter, time_scatter
from rlplace.units import GIB
from tests.benchmarks.results import result


def test_times_are_told_apart_by_health_and_fit(tmp_path: Path) -> None:
    found = [
        result(1.0, 1.1, line=1),
        result(3.0, 1.2, line=2),
        result(1.5, 1.4, line=3, fit=True),
        result(2.0, 2.0, line=4, problem="no"),
    ]
    scatter = time_scatter("t", found)
    clouds = {cloud.label: (cloud.measured, cloud.predicted) for cloud in scatter.clouds}
    assert clouds == {
        "test, healthy": ((1.0,), (1.1,)),
        "test, sick": ((3.0,), (1.2,)),
        "fit": ((1.5,), (1.4,)),
    }
    draw(scatter, tmp_path / "new" / "t.png")
    assert (tmp_path / "new" / "t.png").read_bytes().startswith(b"\x89PNG")


def test_memory_is_in_gib() -> None:
    scatter = memory_scatter("t", [result(memory=(GIB, 2 * GIB)), result()])
    (cloud,) = scatter.clouds
    assert cloud.measured == pytest.approx((1.0,))
    assert cloud.predicted == pytest.approx((2.0,))
    assert memory_scatter("t", [result()]).clouds == ()
