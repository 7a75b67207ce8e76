"""How long a plan for the devices that are left takes, and going on by it in all."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import rlplace
from benchmarks.faults_parts.job import TIMEOUT, graph_of
from rlplace.graph import library
from rlplace.graph.types import OpGraph

STEPS = 8
#: Of the library, with their sizes, the cluster, the devices that are left, and the batch.
QUESTIONS: tuple[tuple[str, dict[str, int], str, int, int], ...] = (
    ("gpt", {"layers": 12, "hidden": 768, "heads": 12, "ffn": 3072}, "1x4xA100-80", 3, 48),
    ("llama", {"layers": 32, "hidden": 4096, "heads": 32, "ffn": 11008}, "2x8xH100-80", 8, 128),
    ("llama", {"layers": 32, "hidden": 4096, "heads": 32, "ffn": 11008}, "8x8xH100-80", 56, 448),
)


@dataclass(frozen=True)
class Restart:
    """A training that lost one of two ranks and goes on with the other.

    Args:
        signal: What the lost rank got.
        ended: Seconds from that to the end of torchrun.
        imported: Seconds from the new start to the end of imports.
        replan: Seconds of the new plan.
        ready: Seconds from the new start until the state is restored.
        first_step: Seconds from the new start to the end of the first step.
        step: Which that is.
        equal: Whether its losses are those of a training that nothing happened to.
    """

    signal: str
    ended: float
    imported: float
    replan: float
    ready: float
    first_step: float
    step: int
    equal: bool


def replans(repeats: int) -> list[str]:
    """Rows of Markdown: seconds of new plans for captured models."""
    lines = ["| model | devices | left | seconds of the new plan |", "| --- | --- | --- | --- |"]
    for model, sizes, devices, left, batch in QUESTIONS:
        graph = library.build(model, **sizes)  # type: ignore[arg-type]  # sizes are ints
        taken = _replan(graph, devices, left, batch, repeats)
        spread = f"{min(taken):.2f}-{max(taken):.2f}"
        lines.append(f"| {model}, {sizes['layers']} layers | {devices} | {left} | {spread} |")
    return lines


def _replan(graph: OpGraph, devices: str, left: int, batch: int, repeats: int) -> list[float]:
    cluster = rlplace.Cluster.parse(devices)
    plan = rlplace.place(rlplace.Instance(graph, cluster, batch)).plan
    replan, taken = rlplace.replanner(graph, cluster), []
    for _ in range(repeats):
        start = time.perf_counter()
        replan(plan, left)
        taken.append(time.perf_counter() - start)
    return taken


def restarts(folder: Path) -> list[Restart]:
    """Kill and freeze a rank of two, and go on with one."""
    graph_of()  # into the cache, as before any training
    whole = _start(folder / "whole", 2)["losses"]
    return [_restart(folder / name, name, whole) for name in ("SIGKILL", "SIGSTOP")]


def _restart(folder: Path, name: str, whole: dict[str, float]) -> Restart:
    _start(folder, 2, name)
    ended = time.time() - float((folder / "failed").read_text())
    begin = time.time()
    found = _start(folder, 1)
    moments, losses = found["moments"], found["losses"]
    gaps = [abs(loss / whole[step] - 1.0) for step, loss in losses.items()]
    return Restart(
        name,
        ended,
        moments["imported"] - begin,
        moments["replan seconds"],
        moments["ready"] - begin,
        moments["first step"] - begin,
        min(map(int, losses)),
        max(gaps) < 1e-6,  # the library computes losses in float32
    )


def _start(folder: Path, ranks: int, name: str = "") -> dict[str, Any]:
    """Train under torchrun; gives what rank 0 noted, nothing where a rank fails."""
    folder.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(ranks), "-m", "benchmarks.faults_parts.job"]
    command += [str(folder), str(STEPS), *([name] if name else [])]
    root = str(Path(__file__).parents[2])
    environment = {**os.environ, "PYTHONPATH": root, "OMP_NUM_THREADS": "1"}
    subprocess.run(command, env=environment, timeout=300, check=not name, capture_output=bool(name))
    if name:
        return {}
    content: dict[str, Any] = json.loads((folder / "marks.json").read_text())
    return content


def restart_table(found: list[Restart]) -> list[str]:
    """The restarts as Markdown."""
    lines = [
        f"| one of two ranks gets (time-out {TIMEOUT:.0f} s) | torchrun has ended | new start: "
        "imported | new plan takes | restored | first step done | which | losses equal |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for one in found:
        seconds = (one.ended, one.imported, one.replan, one.ready, one.first_step)
        cells = (one.signal, *(f"{value:.2f}" for value in seconds), one.step)
        lines.append(f"| {' | '.join(map(str, cells))} | {'yes' if one.equal else 'NO'} |")
    return lines
