from io import StringIO

from rich.console import Console

from rlplace.cost.measured import Calibration, Residual
from rlplace.report.calibration_view import accuracy, render_calibration

_FOUND = Calibration(
    constants={"kind.x.overlap": 0.5},
    errors={"kind.x.overlap": 0.07},
    before={"kind.x.overlap": 0.9, "link.ib.latency": 1e-6},
    undetermined={"link.ib.latency": "no prediction moves"},
    fitted=(Residual("a", "step_time", 2.0, 3.0, 2.2), Residual("b", "step_time", 2.0, 2.0, 2.0)),
    held_out=(Residual("c", "step_time", 4.0, 4.0, 3.0),),
    band=(0.9, 1.2),
    band_rows="held out",
)


def test_accuracy_says_fitted_and_held_out_apart() -> None:
    assert accuracy(_FOUND) == [
        "fitted: 2 rows, median |error| 5.0% (before: 25.0%), 90th percentile 9.0%",
        "held out: 1 rows, median |error| 25.0% (before: 0.0%), 90th percentile 25.0%",
        "measured / predicted of the held out rows: 0.90 to 1.20",
    ]


def test_what_could_not_be_determined_is_named_with_the_reason() -> None:
    console = Console(width=120, record=True, file=StringIO())
    console.print(render_calibration(_FOUND))
    text = console.export_text()
    assert "kind.x.overlap" in text
    assert "0.5" in text
    assert "no prediction moves" in text
