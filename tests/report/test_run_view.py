"""What the command line says of a measurement."""

from rich.console import Console

from rlplace.report.run_view import measurement_data, render_measurement
from rlplace.runtime.measure import Measurement
from rlplace.simulate.types import MemoryUse
from rlplace.units import MIB

MEASURED = Measurement(
    step_times=(0.5,),
    warmup=0,
    losses=(2.0, 1.0),
    memory=(MemoryUse(params=MIB, activations=2 * MIB), MemoryUse(params=3 * MIB)),
    peak_phase=("backward of micro-batch 0 (stage 0)", "optimizer"),
    phase_peaks=({"forward": 2 * MIB, "backward": 3 * MIB}, {"optimizer": 3 * MIB}),
)


def shown(measured: Measurement) -> list[str]:
    console = Console(width=120)
    with console.capture() as capture:
        console.print(render_measurement(measured))
    return [" ".join(line.split()) for line in capture.get().splitlines()]


def test_the_peak_of_each_rank_is_shown_by_cause_and_by_phase() -> None:
    lines = shown(MEASURED)
    assert "0 1.0 0.0 0.0 2.0 3.0 backward of micro-batch 0 (stage 0)" in lines
    assert "1 3.0 0.0 0.0 0.0 3.0 optimizer" in lines
    assert "rank forward MiB backward MiB reduce MiB optimizer MiB" in lines
    assert "0 2.0 3.0 0.0 0.0" in lines
    assert "1 0.0 0.0 0.0 3.0" in lines


def test_the_data_has_what_is_shown() -> None:
    data = measurement_data(MEASURED)
    assert data["phase_peaks"] == [
        {"forward": 2 * MIB, "backward": 3 * MIB},
        {"optimizer": 3 * MIB},
    ]
    assert data["peak_phase"] == ["backward of micro-batch 0 (stage 0)", "optimizer"]
    assert data["peak_memory"] == [3 * MIB, 3 * MIB]
