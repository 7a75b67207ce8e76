"""How quick the simulator and an estimate are.

Plans a second of the compiled event simulator (1F1B) beside the same rules in plain Python, in one
run, and milliseconds of an estimate of an 80-layer transformer on 64 and on 1,024 devices: of the
first plan, and of a further one that differs in one stage. Best of several repeats, one thread.
"""

from __future__ import annotations

import argparse
import platform
import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np
from rich.console import Console
from rich.table import Table

from rlplace.cluster.types import Cluster
from rlplace.plan.schedules import dependencies, one_f_one_b
from rlplace.plan.testing import transformer
from rlplace.plan.types import Action, Instance, Plan
from rlplace.plan.uniform import uniform_plan
from rlplace.simulate.estimate import Estimator
from rlplace.simulate.timeline import orders, simulate


def python_simulate(
    lanes: list[tuple[Action, ...]], forward: list[float], backward: list[float], way: list[float]
) -> float:
    """Step time by the rules of `simulate`, each lane on a core of its own."""
    done: dict[Action, float] = {}
    heads, free = [0] * len(lanes), [0.0] * len(lanes)
    stages, left = len(forward), sum(map(len, lanes))
    while left:
        for index, lane in enumerate(lanes):
            while heads[index] < len(lane):
                action = lane[heads[index]]
                needs = dependencies(action, stages)
                if any(need not in done for need in needs):
                    break
                start = free[index]
                for need in needs:
                    same = need.stage == action.stage
                    start = max(
                        start, done[need] + (0.0 if same else way[min(need.stage, action.stage)])
                    )
                duration = forward if action.kind == "F" else backward
                done[action] = free[index] = start + duration[action.stage]
                heads[index] += 1
                left -= 1
    return max(free)


def best_seconds(call: Callable[[], object], repeats: int, loops: int) -> float:
    """Seconds of one call, the best of `repeats` windows of `loops` calls."""
    windows = []
    for _ in range(repeats):
        started = time.perf_counter()
        for _ in range(loops):
            call()
        windows.append((time.perf_counter() - started) / loops)
    return min(windows)


def simulator_rows(stages: int, micro_batches: int, repeats: int) -> list[tuple[str, str]]:
    """Plans a second, compiled and in plain Python."""
    rng = np.random.default_rng(0)
    lanes = [one_f_one_b(stage, stages, micro_batches) for stage in range(stages)]
    forward, backward = rng.uniform(1, 2, stages), rng.uniform(2, 4, stages)
    way = rng.uniform(0.0, 0.2, stages - 1)
    cores, order = np.arange(stages), orders(lanes)

    def compiled() -> float:
        return float(simulate(order, forward, backward, way, cores).end.max())

    def plain() -> float:
        return python_simulate(lanes, forward.tolist(), backward.tolist(), way.tolist())

    if not np.isclose(compiled(), plain()):
        raise RuntimeError("the two simulators do not agree")
    quick, slow = best_seconds(compiled, repeats, 200), best_seconds(plain, repeats, 1)
    shape = f"1F1B, {stages} stages, {micro_batches} micro-batches"
    return [
        (f"compiled, {shape}", f"{1 / quick:,.0f} plans/s"),
        (f"plain Python, {shape}", f"{1 / slow:,.0f} plans/s"),
        ("ratio", f"{slow / quick:,.0f}"),
    ]


def estimate_rows(repeats: int) -> list[tuple[str, str]]:
    """Milliseconds of an estimate of an 80-layer model."""
    graph, rows = transformer(80, 8192, seq_len=4096, vocab=128256, degrees=(2, 4, 8)), []
    for nodes in (8, 128):
        instance = Instance(graph, Cluster.parse(f"{nodes}x8xA100-80"), global_batch=1024)
        plan = uniform_plan(instance, pp=8, tp=8, micro_batches=8)
        estimator = Estimator(instance)
        estimator.estimate(plan)
        others = iter(_neighbours(plan))
        first = best_seconds(lambda: Estimator(instance).estimate(plan), repeats, 1)  # noqa: B023
        again = best_seconds(lambda: estimator.estimate(next(others)), repeats, 10)  # noqa: B023
        where = f"80 layers on {len(instance.cluster.devices):,} devices"
        rows.append((f"first estimate, {where}", f"{first * 1e3:.1f} ms"))
        rows.append((f"estimate of a neighbour, {where}", f"{again * 1e3:.2f} ms"))
    return rows


def _neighbours(plan: Plan) -> list[Plan]:
    """Plans that differ in the choice of one group each."""
    found = []
    for number, stage in enumerate(plan.stages):
        for index in range(len(stage.choices)):
            choices = list(stage.choices)
            choices[index] = replace(choices[index], recompute="full")
            changed = replace(stage, choices=tuple(choices))
            found.append(
                replace(plan, stages=(*plan.stages[:number], changed, *plan.stages[number + 1 :]))
            )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stages", type=int, default=16, help="pipeline stages (default 16)")
    parser.add_argument("--micro-batches", type=int, default=64, help="micro-batches (default 64)")
    parser.add_argument("--repeats", type=int, default=5, help="windows, the best counts (5)")
    args = parser.parse_args()
    table = Table("what", "figure", title=f"simulator on {platform.processor() or 'this CPU'}")
    rows = simulator_rows(args.stages, args.micro_batches, args.repeats)
    for row in (*rows, *estimate_rows(args.repeats)):
        table.add_row(*row)
    Console().print(table)


if __name__ == "__main__":
    main()
