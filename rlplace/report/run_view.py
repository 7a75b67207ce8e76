"""A measurement as data and as what the command line prints, and the progress of a run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.progress import Progress, TextColumn
from rich.table import Table

from rlplace.runtime.measure import Measurement
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
    columns = (*Progress.get_default_columns(), TextColumn("{task.fields[last]}"))
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("steps", total=steps, last="starting the ranks")

        def advance(job: int, step: int, seconds: float) -> None:
            bar.update(task, completed=step + 1, last=format_seconds(seconds))

        yield advance
