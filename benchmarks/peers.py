"""Our planners beside published ones, each on the profile that the peer itself planned with.

A line for each peer's figure and planner of ours: the step time, and the CPU seconds of the search
(the second of two, so that nothing compiles in it). A peer's figure is what its own cost rule says
of its own plan; where that plan is published, what our rule says of it stands in the same line, for
the two rules are not the same. Reads the public data, and skips what is absent.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a script

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.profiles import DATA, llama_plan
from rlplace.bench.profiles import aceso_gpt, galvatron_llama
from rlplace.cost.profiled import ProfiledCost
from rlplace.plan.types import Instance
from rlplace.planners.costing import Costing
from rlplace.planners.galvatron import galvatron, unrestricted
from rlplace.planners.mesh_options import MeshTables, stage_meshes
from rlplace.planners.registry import PLANNERS
from rlplace.planners.types import Budget


@dataclass(frozen=True)
class Case:
    """A figure of a peer, and the question that it answers.

    Args:
        name: The peer and the question.
        instance: The question.
        cost: The cost model of the peer's profile.
        theirs: Step seconds that the peer says of its own plan.
        theirs_here: Our estimate of that plan; None where it is not published.
        cpu: CPU seconds of the peer's search.
        planners: Ours.
        notes: Further lines.
    """

    name: str
    instance: Instance
    cost: ProfiledCost
    theirs: float
    theirs_here: float | None
    cpu: float
    planners: tuple[str, ...]
    notes: tuple[str, ...] = ()


def galvatron_cases(folder: Path) -> Iterator[Case]:
    """llama2-7b, 8 GPUs, 2048 tokens, global batch 16; two of its figures."""
    for memory, theirs, cpu, batches in ((36, 1.086, 77, 1), (24, 1.541, 14, 4)):
        instance, cost = galvatron_llama(folder, memory)
        costing = Costing(instance, cost)
        published = costing.estimator.estimate(llama_plan(instance))
        counts = (1, 2, 4, 8, 16)
        free = min(unrestricted(costing, count) for count in counts)
        said = min(one_mesh(costing, count) for count in counts)
        rng, spend = np.random.default_rng(0), Budget(seconds=60)
        alike = galvatron(instance, spend, rng, costing, (batches,)).estimate
        yield Case(
            f"Galvatron, llama2-7b, {memory} GB",
            instance,
            cost,
            theirs,
            published.step_time if memory == 36 else None,
            cpu,
            ("galvatron", "overlap", "dynamic", "portfolio"),
            (
                f"its plan has {batches} micro-batches; with as many, galvatron finds "
                + (f"{alike.step_time:.3f} s" if alike else "nothing"),
                f"one stage, sum of its layers: {said:.3f} s on one mesh, {free:.3f} s if layers "
                "may have unlike degrees, which no plan says",
            ),
        )


def one_mesh(costing: Costing, count: int) -> float:
    """Seconds of a step's work of one stage on the best mesh: a sum, as `unrestricted`."""
    tables, groups = MeshTables(costing), len(costing.instance.graph.groups)
    devices = tuple(range(len(costing.instance.cluster.devices)))
    return min(
        (
            tables.options(mesh, count).solve(0, groups, count, 1)[0]
            for mesh in stage_meshes(costing, devices, count)
        ),
        default=float("inf"),
    )


def aceso_cases(folder: Path) -> Iterator[Case]:
    """GPT-1.3B on 4 V100-32 with 28,000 MiB, global batch 1024, without ZeRO as Aceso has it."""
    for fine in (True, False):
        instance, cost = aceso_gpt(folder, "1_3B", fine)
        groups = "five groups a layer" if fine else "two groups a layer"
        name = f"Aceso, GPT-1.3B, {groups}"
        yield Case(
            name, instance, cost, 101.18, None, 51, ("aceso", "overlap", "galvatron", "portfolio")
        )


CASES: dict[str, Callable[[Path], Iterator[Case]]] = {
    "galvatron": galvatron_cases,
    "aceso": aceso_cases,
}


def rows(case: Case, seconds: float, seed: int) -> Iterator[tuple[str, ...]]:
    """A line for each planner: its step time, CPU seconds and evaluations, beside the peer's."""
    for index, name in enumerate(case.planners):
        for _ in range(2):
            started = time.process_time()
            costing = Costing(case.instance, case.cost)
            rng = np.random.default_rng(seed)
            found = PLANNERS[name](case.instance, Budget(seconds), rng, costing)
            spent = time.process_time() - started
        yield (
            case.name if index == 0 else "",
            name,
            f"{found.estimate.step_time:.3f}" if found.plan and found.estimate else "none fits",
            f"{spent:.1f}",
            str(found.evaluations),
            f"{case.theirs:.3f}",
            "-" if case.theirs_here is None else f"{case.theirs_here:.3f}",
            f"{case.cpu:.0f}",
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--public-data", type=Path, default=DATA.parent)
    parser.add_argument("--only", nargs="+", choices=tuple(CASES), default=list(CASES))
    parser.add_argument("--seconds", type=float, default=120.0, help="budget of a search")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    console = Console()
    shown = Table("peer and question", "ours", "s", "CPU s", "plans", "peer's s", "here", "CPU s")
    notes = []
    for name in options.only:
        folder = options.public_data / "profiles" / name
        if not folder.exists():
            console.print(f"{folder} is absent: skipped")
            continue
        for case in CASES[name](folder):
            notes += [f"{case.name}: {note}" for note in case.notes]
            for row in rows(case, options.seconds, options.seed):
                shown.add_row(*row)
    console.print(shown)
    for note in notes:
        console.print(note)


if __name__ == "__main__":
    main()
