"""One GPU: measured step time and peak memory against the estimate, eager and `torch.compile`.

GPT-2 medium and a Llama of 1.2 billion parameters in bf16, AdamW (fused), random weights and data,
the plan of one device. Says so where there is no GPU, and then measures nothing.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

import rlplace
from rlplace.graph.library import spec
from rlplace.plan.types import Instance
from rlplace.runtime.launch import launch
from rlplace.runtime.options import Options

#: (model, tokens of a sample, samples of a step).
WORKLOADS = (("gpt2-medium", 1024, 8), ("llama-3.2-1b", 2048, 4))
_WARMUP, _LR = 5, 1e-3
_GIB = 2.0**30


@dataclass(frozen=True)
class Row:
    """One model on one GPU: seconds of a step, and bytes without context and allocator slack."""

    model: str
    predicted: float
    ours: float
    eager: float
    compiled: float
    predicted_bytes: float
    ours_bytes: float
    eager_bytes: float


def row_of(model: str, seq_len: int, batch: int, kind: str, steps: int) -> Row:
    """Measure a model."""
    graph = rlplace.library.build(model, seq_len=seq_len)
    cluster = rlplace.Cluster.parse(f"1x{kind}")
    instance = Instance(graph, cluster, batch, precision="bf16", memory_margin=0.0)
    plan = rlplace.uniform_plan(instance, micro_batches=1)
    expected = rlplace.estimate(instance, plan)
    options = Options(steps=steps, warmup=_WARMUP, lr=_LR)
    run = launch(plan, graph=graph, options=options, device="cuda", timeout=300)
    eager, size = _by_hand(model, seq_len, batch, steps, lambda module: module)
    compiled, _ = _by_hand(model, seq_len, batch, steps, torch.compile)
    return Row(
        model,
        expected.step_time,
        run.step_time,
        eager,
        compiled,
        expected.memory[0].total - expected.memory[0].reserve,
        max(run.peak_memory),
        size,
    )


def _by_hand(
    model: str, seq_len: int, batch: int, steps: int, wrap: Callable[[nn.Module], nn.Module]
) -> tuple[float, float]:
    """Median seconds of a step of the plain module, and the peak of what it allocated."""
    wanted = spec(model, seq_len=seq_len)
    with torch.device("cuda"):
        module = wanted.make("bfloat16").train()
    data = {name: value.cuda() for name, value in wanted.example(batch).items()}
    optimizer = torch.optim.AdamW(module.parameters(), lr=_LR, fused=True)
    run = wrap(module)
    torch.cuda.reset_peak_memory_stats()
    taken = []
    for _ in range(_WARMUP + steps):
        torch.cuda.synchronize()
        start = time.perf_counter()
        run(**data).backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.cuda.synchronize()
        taken.append(time.perf_counter() - start)
    size = float(torch.cuda.max_memory_allocated())
    del module, optimizer, run, data
    torch.cuda.empty_cache()
    return statistics.median(taken[_WARMUP:]), size


def table_of(rows: list[Row]) -> Table:
    """A line for each model."""
    names = ("model", "predicted ms", "ours", "eager", "compiled", "ours/eager", "error")
    table = Table(*names, "predicted GiB", "ours", "eager", title="one GPU, bf16")
    for row in rows:
        times = (f"{1e3 * t:.1f}" for t in (row.predicted, row.ours, row.eager, row.compiled))
        sizes = (
            f"{size / _GIB:.2f}" for size in (row.predicted_bytes, row.ours_bytes, row.eager_bytes)
        )
        ratios = (f"{row.ours / row.eager:.3f}", f"{row.predicted / row.ours - 1.0:+.1%}")
        table.add_row(row.model, *times, *ratios, *sizes)
    return table


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kind", default="H100-80", help="the GPU's name in the catalogue")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("not run: torch sees no CUDA device here, so nothing was measured")
        return
    rows = [row_of(*workload, options.kind, options.steps) for workload in WORKLOADS]
    if options.json:
        print(json.dumps([asdict(row) for row in rows]))
    else:
        Console().print(f"{torch.cuda.get_device_name()}, estimated as {options.kind}")
        Console().print(table_of(rows))


if __name__ == "__main__":
    main()
