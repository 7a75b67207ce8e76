"""How far the best plans that are found stay above the lower bound, and which limit decides.

For each suite that `rlplace eval` uses: the step time of the best plan (dynamic program or grid,
then annealing) over each limit, median and worst, and in how many instances a limit is the largest
of those that are not made of others; and the CPU milliseconds of a bound, beside those of
Llama-3-70B on 1,024 GPUs. The true gap of a plan is between nothing and what is printed.
"""

from __future__ import annotations

import argparse
import platform
import time
from collections import Counter
from dataclasses import dataclass

import numpy as np
from rich.console import Console
from rich.table import Table

from rlplace.cluster.types import Cluster
from rlplace.envs.instances import suite
from rlplace.graph import library
from rlplace.plan.types import Instance
from rlplace.planners.portfolio import portfolio
from rlplace.planners.types import Budget
from rlplace.simulate.bound import bound, limits

#: From what they are made of to what is made of them; the last that is largest decides.
_LIMITS = ("path", "work", "reduce", "lanes", "memory")
#: A limit counts as larger from here on.
_MORE = 1 + 1e-6


@dataclass(frozen=True)
class Row:
    """One instance: the best step time, each limit, CPU seconds of the bound."""

    best: float
    limits: dict[str, float]
    seconds: float

    @property
    def bound(self) -> float:
        """The largest limit."""
        return max(self.limits.values())

    @property
    def decides(self) -> str:
        """The simplest limit that is as large as the bound."""
        return next(name for name in _LIMITS if self.limits[name] * _MORE >= self.bound)


def measure(instance: Instance, seed: int, steps: int, budget: float) -> Row | None:
    """The best plan and the limits of an instance; None if no plan is found that fits."""
    found = portfolio(instance, Budget(seconds=budget), np.random.default_rng(seed), steps=steps)
    if found.plan is None or found.estimate is None:
        return None
    return Row(found.estimate.step_time, limits(instance), bound_seconds(instance))


def bound_seconds(instance: Instance, repeats: int = 3) -> float:
    """CPU seconds of a bound, the least of some repeats."""
    each = []
    for _ in range(repeats):
        start = time.process_time()
        bound(instance)
        each.append(time.process_time() - start)
    return min(each)


def table(name: str, rows: list[Row]) -> Table:
    """One line a limit: step time over it, and how often it decides."""
    shown = Table(title=f"{name}: {len(rows)} instances")
    for column in ("limit", "median", "90 %", "worst", "decides"):
        shown.add_column(column, justify="right")
    decides = Counter(row.decides for row in rows)
    for limit in (*_LIMITS, "bound"):
        over = [
            row.best / (row.bound if limit == "bound" else row.limits[limit] or np.nan)
            for row in rows
        ]
        over = [ratio for ratio in over if np.isfinite(ratio)]
        if over:
            figures = (f"{np.quantile(over, q):.3f}" for q in (0.5, 0.9, 1.0))
            shown.add_row(limit, *figures, str(decides[limit]) if limit != "bound" else "")
    return shown


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--suites", nargs="+", default=["held-out", "library", "train"])
    parser.add_argument("--count", type=int, default=12, help="instances of a suite")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=1000, help="annealing evaluations")
    parser.add_argument("--budget", type=float, default=60.0, help="seconds an instance")
    parser.add_argument("--each", action="store_true", help="print a line an instance")
    options = parser.parse_args()
    console = Console()
    console.print(f"{platform.processor() or platform.machine()}, seed {options.seed}")
    for name in options.suites:
        rows = []
        for index, instance in enumerate(suite(name, options.count, options.seed)):
            row = measure(instance, options.seed + index, options.steps, options.budget)
            if row is None:
                continue
            rows.append(row)
            if options.each:
                parts = " ".join(
                    f"{key} {row.best / limit:.3g}" for key, limit in row.limits.items() if limit
                )
                console.print(
                    f"{index} {instance.graph.name} on {instance.cluster.name}, "
                    f"batch {instance.global_batch}: {parts}; {1e3 * row.seconds:.0f} ms"
                )
        console.print(table(name, rows))
        console.print(f"bound: median {1e3 * np.median([r.seconds for r in rows]):.1f} ms of CPU")
    large = Instance(library.build("llama-3-70b"), Cluster.parse("128x8xH100-80"), 1024)
    console.print(f"{large.graph.name} on 1,024 GPUs: {1e3 * bound_seconds(large):.1f} ms of CPU")


if __name__ == "__main__":
    main()
