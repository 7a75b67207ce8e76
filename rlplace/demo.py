"""``make demo``: the main job on this machine's CPU, from a model to a measured run.

Discovers the machine, captures a GPT-2 of real width, plans it with the shipped policy for 2 and
for 4 CPU ranks, runs each plan, and sets predicted beside measured step time and memory.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console, RenderableType
from rich.table import Table

from rlplace.api import Placement, place
from rlplace.cluster.discover import discover
from rlplace.cluster.load import save_cluster
from rlplace.graph import library
from rlplace.graph.types import OpGraph
from rlplace.plan.types import Instance
from rlplace.report.cluster_view import render_discovery
from rlplace.report.plan_view import mesh_name, render_plan
from rlplace.report.run_view import step_progress
from rlplace.report.timeline_view import draw, save_trace
from rlplace.runtime.launch import launch
from rlplace.runtime.measure import Measurement
from rlplace.runtime.options import Options
from rlplace.simulate.estimate import timeline
from rlplace.simulate.types import most_held
from rlplace.units import MIB


@dataclass(frozen=True)
class DemoConfig:
    """What the demo does.

    Args:
        model: A model of the library.
        seq_len: Tokens of a sample.
        global_batch: Samples of a step.
        ranks: Numbers of CPU ranks to plan and run for.
        steps: Measured steps of each plan.
        out: Folder for plans, pictures and traces.
    """

    model: str = "gpt2-demo"
    seq_len: int = 64
    global_batch: int = 12
    ranks: tuple[int, ...] = (2, 4)
    steps: int = 20
    out: Path = Path("out/demo")


@dataclass(frozen=True)
class Compared:
    """One plan: what was predicted and what was measured."""

    ranks: int
    placed: Placement
    measured: Measurement


def demo(config: Annotated[DemoConfig, tyro.conf.arg(name="")]) -> list[Compared]:
    """Run the demo and print it as it goes."""
    console = Console()
    config.out.mkdir(parents=True, exist_ok=True)
    console.rule(f"capture {config.model}")
    graph = library.build(config.model, seq_len=config.seq_len)
    console.print(
        f"{graph.params / 1e6:.1f} M parameters, {len(graph.groups)} groups of "
        f"{len(graph.structures)} structures"
    )
    results = [_one(config, graph, ranks, console) for ranks in config.ranks]
    console.rule("predicted and measured")
    console.print(render_comparison(results))
    return results


def _one(config: DemoConfig, graph: OpGraph, ranks: int, console: Console) -> Compared:
    console.rule(f"{ranks} ranks")
    with console.status("measuring this machine"):
        found = discover(ranks)
    console.print(render_discovery(found))
    save_cluster(found.cluster, config.out / f"cluster-{ranks}.yaml")
    instance = Instance(graph, found.cluster, config.global_batch, "fp32", zero_levels=(0,))
    placed = place(instance)
    console.print(render_plan(instance, placed.plan, placed.estimate, placed.bound))
    console.print(
        f"found by {placed.planner} in {placed.seconds:.2f} s; the policy alone: "
        f"{placed.alternatives['policy'].seconds * 1e3:.0f} ms"
    )
    placed.plan.save(config.out / f"plan-{ranks}.json")
    options = Options(steps=config.steps)
    with step_progress(options.steps + options.warmup) as progress:
        measured = launch(placed.plan, graph=graph, options=options, progress=progress)
    measured.save(config.out / f"measurement-{ranks}.json")
    predicted = timeline(instance, placed.plan)
    observed = replace(measured.timeline, title="measured")
    draw([predicted, observed], config.out / f"timeline-{ranks}.png")
    save_trace(observed, config.out / f"trace-{ranks}.json")
    console.print(f"timeline: {config.out / f'timeline-{ranks}.png'}")
    return Compared(ranks, placed, measured)


def render_comparison(results: list[Compared]) -> RenderableType:
    """Predicted and measured step time, and memory of the fullest rank (states, activations)."""
    table = Table(header_style="bold", box=None, pad_edge=False)
    table.add_column("ranks", justify="right")
    table.add_column("stages")
    for name in ("micro-\nbatches", "estimate\nms", "measured\nms", "error"):
        table.add_column(name, justify="right")
    for name in ("estimate\nMiB", "measured\nMiB", "error"):
        table.add_column(name, justify="right")
    for result in results:
        plan, guess, seen = result.placed.plan, result.placed.estimate, result.measured
        memory = most_held(guess.memory), most_held(seen.memory)
        table.add_row(
            str(result.ranks),
            " > ".join(mesh_name(stage.mesh) for stage in plan.stages),
            str(plan.micro_batches),
            f"{guess.step_time * 1e3:.0f}",
            f"{seen.step_time * 1e3:.0f}",
            f"{guess.step_time / seen.step_time - 1.0:+.0%}",
            f"{memory[0] / MIB:.0f}",
            f"{memory[1] / MIB:.0f}",
            f"{memory[0] / memory[1] - 1.0:+.0%}",
        )
    return table


if __name__ == "__main__":
    demo(tyro.cli(DemoConfig))
