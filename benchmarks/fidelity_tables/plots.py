"""Scatter plots: the data by one function, the drawing by another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.fidelity_tables.metrics import healthy_lines, timed, weighed
from benchmarks.fidelity_tables.types import Result
from rlplace.units import GIB


@dataclass(frozen=True)
class Cloud:
    """Points of one kind of rows: measured and predicted, in the unit of its figure."""

    label: str
    measured: tuple[float, ...]
    predicted: tuple[float, ...]


@dataclass(frozen=True)
class Scatter:
    """A figure: predicted over measured."""

    title: str
    unit: str
    clouds: tuple[Cloud, ...]


def time_scatter(table: str, results: Sequence[Result]) -> Scatter:
    """Step times in seconds: healthy test rows, sick test rows and fit rows."""
    counted = timed(results)
    healthy = healthy_lines(result.row for result in counted)
    kinds: dict[str, list[Result]] = {"test, healthy": [], "test, sick": [], "fit": []}
    for result in counted:
        well = (result.row.table, result.row.line) in healthy
        kinds["fit" if result.row.fit else f"test, {'healthy' if well else 'sick'}"].append(result)
    clouds = (
        Cloud(label, tuple(_seconds(r) for r in rows), tuple(r.step_time for r in rows))
        for label, rows in kinds.items()
        if rows
    )
    return Scatter(f"{table}: step time", "s", tuple(clouds))


def memory_scatter(table: str, results: Sequence[Result]) -> Scatter:
    """Peak memory in GiB."""
    counted = weighed(results)
    measured = tuple((r.row.measured.memory or 0.0) / GIB for r in counted)
    cloud = Cloud("rows", measured, tuple(r.memory / GIB for r in counted))
    return Scatter(f"{table}: memory", "GiB", (cloud,) if counted else ())


def draw(scatter: Scatter, path: Path) -> None:
    """Draw a figure on logarithmic axes, with the diagonal and lines at plus and minus 20 %."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 6))
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for cloud in scatter.clouds:
        axes.scatter(cloud.measured, cloud.predicted, s=9, alpha=0.5, label=cloud.label)
    values = [v for c in scatter.clouds for v in (*c.measured, *c.predicted) if v > 0]
    ends = [min(values), max(values)]
    for factor, style in ((1.0, "-"), (0.8, ":"), (1.2, ":")):
        axes.plot(ends, [factor * end for end in ends], style, color="grey", linewidth=0.8)
    axes.set(xscale="log", yscale="log", title=scatter.title)
    axes.set_xlabel(f"measured, {scatter.unit}")
    axes.set_ylabel(f"predicted, {scatter.unit}")
    axes.legend(loc="upper left")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120, bbox_inches="tight")


def _seconds(result: Result) -> float:
    assert result.row.measured.step_time is not None
    return result.row.measured.step_time
