"""A measurement as data and as what the command line prints, and the progress of a run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.progress import Progress, TextColumn
from rich.table import Table

from rlplace.runtime.measure import Measurement
from rlplace.runtime.reports import StepReport
from rlplace.units import MIB, format_seconds


def measurement_data(measured: Measurement) -> dict[str, Any]:
    """What `rlplace run --json` prints."""
    return {
        "step_time": measured.step_time,
        "spread": measured.spread,
        "step_times": list(measured.step_times),
        "warmup": measured.warmup,
        "losses": list(measured.losses),
        "peak_memory": list(measured.peak_memory),
        "traffic": measured.traffic,
        "device": measured.device,
    }


def render_measurement(measured: Measurement) -> RenderableType:
    """Step time, losses, and the memory of each rank."""
    head = (
        f"step {format_seconds(measured.step_time)} (median of {len(measured.step_times)}, "
        f"spread {format_seconds(measured.spread)}), loss {measured.losses[0]:.4f} -> "
        f"{measured.losses[-1]:.4f}"
    )
    table = Table(header_style="bold", box=None, pad_edge=False)
    for name in ("rank", "params MiB", "gradients", "optimizer", "activations", "peak"):
        table.add_column(name, justify="right")
    for rank, use in enumerate(measured.memory):
        parts = (use.params, use.gradients, use.optimizer, use.activations, use.total)
        table.add_row(str(rank), *(f"{part / MIB:.1f}" for part in parts))
    return Group(head, "", table)


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
