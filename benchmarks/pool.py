"""How many plans a minute are measured: a pool of ranks that stay, or a start for each plan.

Plans of GPT-2 (23 M parameters) on two gloo ranks, a few steps each: what a measured reward does.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence

from rich.console import Console
from rich.table import Table

import rlplace
from rlplace.graph.types import OpGraph
from rlplace.plan.types import Instance, Plan
from rlplace.runtime.launch import launch
from rlplace.runtime.options import Options
from rlplace.runtime.pool import Pool
from rlplace.runtime.validate import stand_in_cluster

RANKS, BATCH = 2, 8
DEGREES: tuple[dict[str, int], ...] = (
    {},
    {"pp": 2, "micro_batches": 4},
    {"tp": 2},
    {"zero": 1},
    {"pp": 2, "micro_batches": 2},
    {"zero": 3},
)


def plans_of(graph: OpGraph) -> list[Plan]:
    """Uniform plans on all ranks."""
    instance = Instance(graph, stand_in_cluster(RANKS), BATCH, precision="fp32")
    return [rlplace.uniform_plan(instance, **degrees) for degrees in DEGREES]


def rate(measure: Callable[[Plan], object], plans: Sequence[Plan]) -> float:
    """Plans a minute."""
    start = time.perf_counter()
    for plan in plans:
        measure(plan)
    return 60.0 * len(plans) / (time.perf_counter() - start)


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=3, help="measured steps of a plan")
    steps = parser.parse_args().steps
    graph = rlplace.library.build("gpt2-demo", seq_len=64)
    plans, options = plans_of(graph), Options(steps=steps, warmup=1)
    with Pool(RANKS) as pool:
        pool.measure(plans[0], graph=graph, options=options)  # starts it
        kept = rate(lambda plan: pool.measure(plan, graph=graph, options=options), plans)
    started = rate(lambda plan: launch(plan, graph=graph, options=options), plans)
    table = Table("ranks", "plans a minute", title=f"{len(plans)} plans, {1 + steps} steps each")
    table.add_row("a pool that stays", f"{kept:.1f}")
    table.add_row("a start for each plan", f"{started:.1f}")
    Console().print(table)
    Console().print(f"ratio {kept / started:.1f}")


if __name__ == "__main__":
    main()
