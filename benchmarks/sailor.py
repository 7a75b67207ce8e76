"""Plans for Sailor's own problems under its own cost rule, beside what Sailor and Metis find.

Reads the profiles of eth-easl/sailor and says so where they are absent. Run from the root of the
repository:

    python -m benchmarks.sailor --public-data ../shared/data [--seconds 10]

A100-40 and V100-16, 4 a node, in one zone; predicted seconds of a step, and CPU seconds of the
search (the compilation of its inner loop apart). The figures of the peers were found by running
their planners from that repository on two shared cores, 9 to 14 CPU s each for Sailor.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from rlplace.bench.public import SAILOR
from rlplace.cost.given.sailor_form import SailorPlan
from rlplace.planners.given.sailor import place_sailor
from rlplace.planners.types import Budget

#: Step seconds of the plans of Sailor and, where it was run to its end, Metis on `SAILOR`.
PEERS = (
    (22.991, 22.454),
    (13.005, 12.062),
    (7.402, None),
    (5.884, None),
    (2.771, None),
    (1.912, None),
    (163.745, None),
    (83.299, None),
    (43.164, None),
)


def main() -> None:
    """Search every case, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--public-data", type=Path, default=Path("../shared/data"))
    parser.add_argument("--seconds", type=float, default=10.0, help="wall seconds of a search")
    given = parser.parse_args()
    folder = given.public_data / "profiles" / "sailor"
    if not folder.exists():
        raise SystemExit(f"{folder} is absent: the profiles of eth-easl/sailor are needed")
    table = Table("model", "A100+V100", "step s", "bound s", "CPU s", "programs", "Sailor", "Metis")
    plans = []
    for case, (sailor, metis) in zip(SAILOR, PEERS, strict=True):
        instance = case.read(folder)
        place_sailor(instance, Budget(evaluations=1), np.random.default_rng(0))
        before = time.process_time()
        found = place_sailor(instance, Budget(seconds=given.seconds), np.random.default_rng(0))
        spent = time.process_time() - before
        table.add_row(
            case.model,
            f"{case.fast}+{case.slow}",
            f"{found.value:.4f}",
            f"{found.bound:.4f}",
            f"{spent:.1f}",
            str(found.evaluations),
            f"{sailor:.3f}",
            "-" if metis is None else f"{metis:.3f}",
        )
        if found.placement is not None:
            plans.append(f"{case.model} {case.fast}+{case.slow}: {_words(found.placement)}")
    console = Console(width=100)
    console.print(table)
    for line in plans:
        console.print(line, highlight=False)


def _words(plan: SailorPlan) -> str:
    stages = []
    for stage in plan.stages:
        kinds = dict.fromkeys(stage.replicas)
        parts = (f"{stage.replicas.count(of)} x {of[0]} tp{of[1]}" for of in kinds)
        stages.append(f"{stage.start}-{stage.stop - 1} on {' and '.join(parts)}")
    return f"micro-batch {plan.micro_batch}, layers {', '.join(stages)}"


if __name__ == "__main__":
    main()
