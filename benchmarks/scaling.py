"""How the time to plan grows with equal layers and with devices.

CPU seconds of a planner on a model with more and more equal layers on 64 devices, and on models of
80 layers on more and more devices (nodes of eight A100-80): one that fits on four of them, and one
as wide as Llama-70B, from 32 on. The graphs are there already, and all that is compiled: what is
timed is the search, from a fresh instance to its plan. One process, one thread.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from rlplace.bench.planners import planners
from rlplace.cluster.types import Cluster
from rlplace.graph import library
from rlplace.graph.types import OpGraph
from rlplace.plan.types import Instance
from rlplace.planners.types import Budget, Planner

#: Hidden size, heads, KV heads and width of the MLP.
SHAPES = {"5b": (2048, 16, 16, 5632), "70b": (8192, 64, 8, 28672)}
LAYERS = (12, 24, 48, 80, 96, 192)
DEVICES = (4, 8, 16, 32, 64, 128, 256, 512, 1024)
#: Layers where devices grow, devices where layers do, and the least devices of a wide model.
_DEEP, _WIDE, _LEAST = 80, 64, 32
_SAMPLES = 16


@dataclass(frozen=True)
class Row:
    """A planner on a model of `layers` layers on `devices` devices.

    Args:
        sweep: What grows: ``layers`` or ``devices``.
        seconds: CPU seconds of the search.
        evaluations: Plans that were estimated.
        stages: Of its plan; 0 if it found none that fits.
        step_time: Seconds of a step of its plan, if there is one.
        stopped: Why it stopped.
    """

    sweep: str
    planner: str
    model: str
    layers: int
    devices: int
    seconds: float
    evaluations: int
    stages: int
    step_time: float | None
    stopped: str


@cache
def graph_of(model: str, layers: int) -> OpGraph:
    """A Llama of a shape with so many layers."""
    hidden, heads, kv_heads, ffn = SHAPES[model]
    return library.build(
        "llama",
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        ffn=ffn,
        vocab=32000,
        seq_len=2048,
    )


def question(model: str, layers: int, devices: int) -> Instance:
    """16 samples a device, on nodes of eight."""
    nodes, last = divmod(devices, 8)
    cluster = Cluster.parse(f"{nodes}x8xA100-80" if not last else f"{devices}xA100-80")
    return Instance(graph_of(model, layers), cluster, _SAMPLES * devices)


def sweeps(
    layers: Sequence[int], devices: Sequence[int]
) -> Iterator[tuple[str, tuple[str, int, int]]]:
    """What grows, and the model, layers and devices of each question."""
    for count in layers:
        yield "layers", ("5b", count, _WIDE)
    for count in devices:
        yield "devices", ("5b", _DEEP, count)
    for count in devices:
        if count >= _LEAST:
            yield "devices", ("70b", _DEEP, count)


def row_of(
    sweep: str, name: str, planner: Planner, question_of: tuple[str, int, int], most: float
) -> Row:
    """Time a planner on a question."""
    instance = question(*question_of)
    start = time.process_time()
    found = planner(instance, Budget(most), np.random.default_rng(0))
    seconds = time.process_time() - start
    fits = found.estimate if found.plan is not None else None
    return Row(
        sweep,
        name,
        *question_of,
        seconds,
        found.evaluations,
        len(found.plan.stages) if found.plan is not None else 0,
        fits.step_time if fits is not None else None,
        found.stopped,
    )


def table_of(rows: Sequence[Row]) -> Table:
    """A line a question."""
    table = Table(title="CPU seconds to plan")
    heads = ("planner", "model", "layers", "devices", "CPU s", "plans", "stages", "step", "stopped")
    for head in heads:
        table.add_column(head, justify="left" if head in ("planner", "model") else "right")
    for row in rows:
        step = "nothing fits" if row.step_time is None else f"{row.step_time:.3g} s"
        counts = (row.layers, row.devices, f"{row.seconds:.2f}", row.evaluations, row.stages)
        table.add_row(row.planner, row.model, *map(str, counts), step, row.stopped)
    return table


def lines_of(rows: Sequence[Row], sweep: str) -> dict[str, tuple[list[int], list[float]]]:
    """Label -> what grows, and seconds, of the lines of a panel."""
    lines: dict[str, tuple[list[int], list[float]]] = {}
    for row in rows:
        if row.sweep == sweep:
            xs, ys = lines.setdefault(f"{row.planner}, {row.model}", ([], []))
            xs.append(row.layers if sweep == "layers" else row.devices)
            ys.append(row.seconds)
    return lines


def draw(rows: Sequence[Row], path: Path) -> None:
    """Draw a panel for each sweep (PNG, SVG or PDF)."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.0, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    titles = {"layers": f"on {_WIDE} devices", "devices": f"{_DEEP} layers"}
    panel = None
    for index, (sweep, title) in enumerate(titles.items()):
        panel = figure.add_subplot(1, 2, index + 1, sharey=panel)
        lines = lines_of(rows, sweep)
        for label, (xs, ys) in lines.items():
            panel.plot(xs, ys, marker="o", label=label)
        ticks = sorted({x for xs, _ in lines.values() for x in xs})
        panel.set(xscale="log", yscale="log", xlabel=sweep, ylabel="CPU s to plan", title=title)
        panel.set_xticks(ticks, [str(tick) for tick in ticks], minor=False)
        panel.minorticks_off()
        panel.grid(visible=True, alpha=0.3)
        panel.legend(fontsize="small")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def main() -> None:
    """Run, print, draw."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--planner", nargs="+", default=["dynamic"])
    parser.add_argument("--layers", type=int, nargs="*", default=LAYERS)
    parser.add_argument("--devices", type=int, nargs="*", default=DEVICES)
    parser.add_argument("--seconds", type=float, default=600.0, help="wall seconds of a search")
    parser.add_argument("--picture", type=Path, help="draw it here, as docs/scaling.png")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    rows = []
    for name, planner in planners(args.planner).items():
        row_of("", name, planner, ("5b", 2, 4), args.seconds)  # compiles
        for sweep, asked in sweeps(args.layers, args.devices):
            rows.append(row_of(sweep, name, planner, asked, args.seconds))
    if args.picture:
        draw(rows, args.picture)
    if args.json:
        print(json.dumps([asdict(row) for row in rows], indent=1))
    else:
        Console().print(table_of(rows))


if __name__ == "__main__":
    main()
