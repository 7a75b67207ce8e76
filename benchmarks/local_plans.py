"""Predicted against measured on this machine: ten plans of one model on CPU ranks.

Discovers the machine with 2 and with 4 ranks, predicts every plan from what it measured, runs all
of them on gloo, and prints the errors. Nothing is fitted to the runs. Memory is compared without
what the tracker of a CPU run cannot see: the allocator's reserve and the working set of an op.

    python benchmarks/local_plans.py --write docs/predicted_and_measured.md
"""

from __future__ import annotations

import argparse
import platform
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from rlplace.cluster.discover import busy, discover
from rlplace.cluster.types import Cluster
from rlplace.graph import library
from rlplace.graph.types import OpGraph
from rlplace.plan.types import Instance, Plan
from rlplace.plan.uniform import uniform_plan
from rlplace.runtime.jobs import Job
from rlplace.runtime.launch import launch_many
from rlplace.runtime.measure import Measurement
from rlplace.runtime.trainer import Options
from rlplace.simulate.estimate import estimate
from rlplace.simulate.types import Estimate, most_held
from rlplace.units import MIB


@dataclass(frozen=True)
class Row:
    """One plan: what was predicted, what was measured."""

    name: str
    ranks: int
    predicted: Estimate
    measured: Measurement

    @property
    def time_error(self) -> float:
        """Predicted over measured step time, minus 1."""
        return self.predicted.step_time / self.measured.step_time - 1.0

    @property
    def memory(self) -> tuple[float, float]:
        """Predicted and measured bytes of states and activations on the fullest rank."""
        return most_held(self.predicted.memory), most_held(self.measured.memory)


def plans(instance: Instance) -> Iterator[tuple[str, Plan]]:
    """The plans for an instance of 2 or 4 ranks."""
    groups = len(instance.graph.groups)
    if len(instance.cluster.devices) == 2:
        yield "single", uniform_plan(instance, devices=(0,))
        yield "single, recompute", uniform_plan(instance, devices=(0,), recompute="full")
        yield "dp2", uniform_plan(instance)
        yield "dp2, recompute", uniform_plan(instance, recompute="full")
        yield "tp2", uniform_plan(instance, tp=2)
        yield "pp2, 1F1B", uniform_plan(instance, pp=2, micro_batches=4)
        yield "pp2, GPipe", uniform_plan(instance, pp=2, micro_batches=4, schedule="gpipe")
        uneven = (groups // 3,)
        yield "pp2, uneven", uniform_plan(instance, pp=2, micro_batches=4, cuts=uneven)
    else:
        yield "pp2 x dp2", uniform_plan(instance, pp=2, micro_batches=4)
        yield "dp4", uniform_plan(instance)
        yield "tp2 x dp2", uniform_plan(instance, tp=2)


def compare(graph: OpGraph, cluster: Cluster, batch: int, steps: int, repeats: int) -> list[Row]:
    """Predict and run all plans for a cluster; of `repeats` runs the median one counts."""
    instance = Instance(graph, cluster, batch, "fp32", zero_levels=(0,))
    named = dict(plans(instance))
    options = Options(steps=steps)
    jobs = [Job(plan, graph, options=options) for plan in named.values()]
    runs = [launch_many(jobs) for _ in range(repeats)]
    rows = []
    for index, (name, plan) in enumerate(named.items()):
        own = sorted((run[index] for run in runs), key=lambda m: m.step_time)
        middle = own[len(own) // 2]
        rows.append(Row(name, len(plan.devices), estimate(instance, plan), middle))
    return rows


def table(rows: list[Row]) -> str:
    """The rows as a Markdown table, with the median and the worst error below."""
    lines = [
        "| plan | ranks | predicted ms | measured ms (IQR) | error | predicted MiB | measured MiB "
        "| error |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        guess, seen = row.memory
        lines.append(
            f"| {row.name} | {row.ranks} | {row.predicted.step_time * 1e3:.0f} "
            f"| {row.measured.step_time * 1e3:.0f} ({row.measured.spread * 1e3:.0f}) "
            f"| {row.time_error:+.1%} | {guess / MIB:.0f} | {seen / MIB:.0f} "
            f"| {guess / seen - 1.0:+.1%} |"
        )
    errors = np.abs([row.time_error for row in rows])
    lines += [
        "",
        f"Step time: median error {np.median(errors):.1%}, worst {errors.max():.1%}.",
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", default="gpt2-demo")
    parser.add_argument("--seq-len", type=int, default=128)
    parser.add_argument("--global-batch", type=int, default=8)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--write", type=Path, help="also write the table to this file")
    wanted = parser.parse_args()
    load = busy()
    if load > 0.1:
        print(f"warning: {load:.0%} of the cores are busy; times will be off")
    graph = library.build(wanted.model, seq_len=wanted.seq_len)
    rows: list[Row] = []
    for ranks in (2, 4):
        cluster = discover(ranks).cluster
        rows += compare(graph, cluster, wanted.global_batch, wanted.steps, wanted.repeats)
    text = table(rows)
    print(text)
    if wanted.write is not None:
        wanted.write.write_text(f"{_heading(wanted, graph)}\n\n{text}\n")


def _heading(wanted: argparse.Namespace, graph: OpGraph) -> str:
    return (
        "# Predicted against measured, on CPU ranks\n\n"
        f"{wanted.model} ({graph.params / 1e6:.1f} M parameters), {wanted.seq_len} tokens, global "
        f"batch {wanted.global_batch}, fp32, AdamW; median of {wanted.steps} steps, the median of "
        f"{wanted.repeats} runs. {platform.machine()}, {torch.get_num_threads()} threads at hand, "
        f"torch {torch.__version__}, gloo.\n"
        "Predictions come from `discover` alone; nothing is fitted to the runs. Memory is states "
        "and saved activations of the fullest rank.\n\n"
        "    python benchmarks/local_plans.py --write docs/predicted_and_measured.md"
    )


if __name__ == "__main__":
    main()
