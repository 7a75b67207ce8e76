from __future__ import annotations

import pytest

import rlplace
from rlplace.report.run_view import StepBar
from rlplace.runtime.options import Options
from rlplace.runtime.reports import StepReport
from rlplace.runtime.trainer import Trainer
from rlplace.training import listeners
from tests.runtime.small import plan


def test_the_public_trainer_is_a_trainer() -> None:
    assert issubclass(rlplace.Trainer, Trainer)
    assert rlplace.run.__module__ == "rlplace.training"


@pytest.mark.parametrize(
    ("progress", "first", "count"),
    [(True, True, 1), (True, False, 0), (False, True, 0), (None, True, 0)],
)
def test_rank_0_alone_shows_a_bar(progress: bool | None, first: bool, count: int) -> None:
    # Under pytest stderr is no terminal.
    with listeners(plan(), Options(), False, progress, first) as found:
        assert [type(one) for one in found] == [StepBar] * count


def test_a_bar_lives_through_several_fits(capsys: pytest.CaptureFixture[str]) -> None:
    bar = StepBar()
    report = StepReport(1, 0.5, 0.1, 1e-3, None, 4, 40.0, 1)
    for steps in (2, None):
        bar.begin(steps)
        bar.step(report)
        bar.end()
    assert capsys.readouterr().out == ""
