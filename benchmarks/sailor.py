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
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from rlplace.cost.given.sailor_form import SailorPlan, read_sailor_instance
from rlplace.planners.given.sailor import place_sailor
from rlplace.planners.types import Budget


@dataclass(frozen=True)
class Case:
    """A problem, and the step seconds that peers reach.

    Args:
        model: Name.
        batch: Samples of a step.
        fast: A100-40.
        slow: V100-16.
        sailor: Of Sailor's plan.
        metis: Of Metis' plan; None where it was not run to its end.
    """

    model: str
    batch: int
    fast: int
    slow: int
    sailor: float
    metis: float | None = None


CASES = (
    Case("OPT-350", 1024, 8, 8, 22.991, 22.454),
    Case("OPT-350", 1024, 16, 16, 13.005, 12.062),
    Case("OPT-350", 1024, 32, 32, 7.402),
    Case("OPT-350", 1024, 32, 96, 5.884),
    Case("OPT-350", 1024, 80, 240, 2.771),
    Case("OPT-350", 1024, 128, 384, 1.912),
    Case("GPT-Neo-2.7", 2048, 8, 8, 163.745),
    Case("GPT-Neo-2.7", 2048, 16, 16, 83.299),
    Case("GPT-Neo-2.7", 2048, 32, 32, 43.164),
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
    for case in CASES:
        devices = {"A100-40": case.fast, "V100-16": case.slow}
        instance = read_sailor_instance(folder, case.model, devices, case.batch)
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
            f"{case.sailor:.3f}",
            "-" if case.metis is None else f"{case.metis:.3f}",
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
