"""A measurement as data and as what the command line prints, and the progress of a run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import zip_longest
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.progress import Progress, TextColumn
from rich.table import Table

from rlplace.runtime.measure import Measurement
from rlplace.runtime.reports import StepReport
from rlplace.simulate.peaks import OPTIMIZER, REDUCE
from rlplace.units import MIB, format_seconds

#: Kinds of phases of a step whose peaks are shown.
_PHASES = ("forward", "backward", REDUCE, OPTIMIZER)


def measurement_data(measured: Measurement) -> dict[str, Any]:
    """What `rlplace run --json` prints."""
    return {
        "step_time": measured.step_time,
        "spread": measured.spread,
        "step_times": list(measured.step_times),
        "warmup": measured.warmup,
        "losses": list(measured.losses),
        "peak_memory": list(measured.peak_memory),
        "peak_phase": list(measured.peak_phase),
        "phase_peaks": list(measured.phase_peaks),
        "traffic": measured.traffic,
        "device": measured.device,
    }


def render_measurement(measured: Measurement) -> RenderableType:
    """Step time, losses, and the memory of each rank by cause and by phase."""
    head = (
        f"step {format_seconds(measured.step_time)} (median of {len(measured.step_times)}, "
        f"spread {format_seconds(measured.spread)}), loss {measured.losses[0]:.4f} -> "
        f"{measured.losses[-1]:.4f}"
    )
    causes = _table("rank", "params MiB", "gradients", "optimizer", "activations", "peak", "in the")
    for rank, (use, phase) in enumerate(zip_longest(measured.memory, measured.peak_phase)):
        parts = (use.params, use.gradients, use.optimizer, use.activations, use.total)
        causes.add_row(str(rank), *map(_mib, parts), phase)
    phases = _table("rank", *(f"{name} MiB" for name in _PHASES))
    for rank, peaks in enumerate(measured.phase_peaks):
        phases.add_row(str(rank), *(_mib(peaks.get(name, 0.0)) for name in _PHASES))
    return Group(head, "", causes, "", phases)


def _table(*names: str) -> Table:
    table = Table(header_style="bold", box=None, pad_edge=False)
    for name in names:
        table.add_column(name, justify="right")
    return table


def _mib(size: float) -> str:
    return f"{size / MIB:.1f}"


@contextmanager
def step_progress(
    steps: int, quiet: bool = False
) -> Iterator[Callable[[int, int, float], None] | None]:
    """A progress bar on stderr; yields the callback that `launch` takes, None where quiet."""
    if quiet:
        yield None
        return
    with _bar() as bar:
        task = bar.add_task("steps", total=steps, last="starting the ranks")

        def advance(job: int, step: int, seconds: float) -> None:
            bar.update(task, completed=step + 1, last=format_seconds(seconds))

        yield advance


class StepBar:
    """A progress bar on stderr that a trainer moves (a `rlplace.runtime.reports.Callback`)."""

    def __init__(self) -> None:
        self._bar: Progress | None = None

    def begin(self, steps: int | None) -> None:
        """Show the bar; it pulses where the number of steps is not known."""
        self._bar = _bar()
        self._task = self._bar.add_task("steps", total=steps, last="")
        self._bar.start()

    def step(self, report: StepReport) -> None:
        """Move on."""
        assert self._bar is not None
        last = f"loss {report.loss:.4f}, {format_seconds(report.seconds)}"
        self._bar.update(self._task, advance=1, last=f"{last}, {report.tokens_per_s:.0f} tokens/s")

    def end(self) -> None:
        """Take the bar away."""
        assert self._bar is not None
        self._bar.stop()


def _bar() -> Progress:
    columns = (*Progress.get_default_columns(), TextColumn("{task.fields[last]}"))
    return Progress(*columns, console=Console(stderr=True), transient=True)
