"""Our placers beside published ones on the op graphs of four forms, under each form's own rule.

Reads the public data and says so where it is absent. Run from the root of the repository:

    python -m benchmarks.placements [--public-data ../shared/data] [--seconds 5] [--only piper]

The budget is wall seconds of each search; CPU seconds are of the search, what is compiled apart.
`published` is the best figure that we know of another, `target` what ours has to reach:

- dnn-partitioning: the published optimum of contiguous parts, and of any parts the better of that
  and of the published local search; where none is published, the optimum of contiguous parts that
  `contiguous` proves itself stands as the target of `scattered`;
- Piper: the largest stage load, and all device-seconds shared evenly below it;
- DOPPLER: the median makespan over the orders of equal times, and what no placement is below;
- GiPH: mean over the problems of the makespan over that of HEFT; after two moves an op, as GiPH
  counts its search, and after the whole budget.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a script

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.profiles import DATA
from rlplace.bench.public import BERT, given
from rlplace.cost.given import makespan_bound, median_makespan, piper_bound
from rlplace.graph.formats.types import GivenInstance
from rlplace.planners.given.best import best
from rlplace.planners.given.contiguous import best_contiguous
from rlplace.planners.given.heft import heft
from rlplace.planners.given.max_load import contiguous, scattered
from rlplace.planners.given.piper import piper
from rlplace.planners.given.types import Placed, Placer
from rlplace.planners.types import Limits

#: What is within this share of a figure equals it: figures are published with six digits.
_EQUAL = 1e-5
#: Published with these three digits, so that what rounds to it equals it.
_BERT = 0.00256


@dataclass(frozen=True)
class Row:
    """A problem, and what was found.

    Args:
        problem: The problem.
        placer: Ours.
        ours: Value of our placement.
        cpu: CPU seconds of the search.
        published: The best figure of another that we know.
        target: What ours has to reach.
        bound: What no placement of its kind is below.
    """

    problem: str
    placer: str
    ours: float
    cpu: float
    published: float | None = None
    target: float | None = None
    bound: float | None = None

    @property
    def met(self) -> bool | None:
        """Whether the target is reached; None without one."""
        return None if self.target is None else self.ours <= self.target * (1 + _EQUAL)

    @property
    def cells(self) -> tuple[str, ...]:
        """As a row of the table."""
        figures = (self.ours, self.published, self.target, self.bound)
        words = {None: "", True: "yes", False: "NO"}
        return (
            self.problem,
            self.placer,
            *("" if figure is None else f"{figure:.5g}" for figure in figures),
            words[self.met],
            f"{self.cpu:.2f}",
        )


def spent(
    placer: Placer[Any], instance: GivenInstance, budget: Limits
) -> tuple[Placed[Any], float]:
    """What a placer finds, and its CPU seconds."""
    before = time.process_time()
    found = placer(instance, budget, np.random.default_rng(0))
    return found, time.process_time() - before


def dnn_partitioning(folder: Path, budget: Limits) -> Iterator[Row]:
    """Two rows a graph: contiguous parts, and any."""
    problems = given(folder / "dnn_partitioning_graphs.json")
    known = references(folder)["dnn_partitioning_max_load"]
    for name, instance in problems.items():
        figures = known.get(name.removeprefix("throughput-inputs/"), {})
        optimum = figures.get("dp_contiguous_optimum")
        parts, cpu = spent(contiguous, instance, budget)
        bound = best_contiguous(instance).bound
        yield Row(name, "contiguous", parts.value, cpu, optimum, optimum, bound)
        local = figures.get("local_search_10_restarts_noncontiguous")
        figure = min(optimum, local) if optimum and local else None
        found, cpu = spent(scattered, instance, budget)
        yield Row("", "scattered", found.value, cpu, figure, figure or parts.value)


def pipelines(folder: Path, budget: Limits) -> Iterator[Row]:
    """Piper's graphs; the bar is known of one."""
    for name, instance in given(folder / "piper_graphs.json").items():
        found, cpu = spent(piper, instance, budget)
        published, target = (_BERT, _BERT + 5e-6) if name == BERT else (None, None)
        bound = piper_bound(instance)
        yield Row(name, "piper", found.value, cpu, published, target, bound)


def dataflows(folder: Path, budget: Limits) -> Iterator[Row]:
    """DOPPLER's graphs; bars are known of two."""
    known = references(folder)["doppler_simulator"]
    peers = {
        "chain_mm": known["chain_mm_4dev"]["peer_simulator"]["doppler_60_imitation_then_150_simrl"][
            "best"
        ],
        "ffnn": known["ffnn_4dev"]["peer_simulator"]["critical_path_50_runs"]["min"],
    }
    targets = {"chain_mm": 1300.1, "ffnn": 63.14}
    for name, instance in given(folder / "doppler_graphs.json").items():
        found, cpu = spent(best, instance, budget)
        figures = peers.get(name), targets.get(name), makespan_bound(instance)
        yield Row(name, "best", found.value, cpu, *figures)


def networks(folder: Path, budget: Limits) -> Iterator[Row]:
    """GiPH's problems, in the mean."""
    known = references(folder)["giph_small8dev_15_heldout_cases_ratio_to_heft"]
    problems = given(folder / "giph_small8dev.json")
    base = {
        name: median_makespan(instance, _placement(heft, instance))
        for name, instance in problems.items()
    }
    for words, limits in (("two moves an op", None), ("the whole budget", budget)):
        ratios, cpus = [], []
        for name, instance in problems.items():
            few = Limits(evaluations=4 + 2 * len(instance.graph.groups))
            found, cpu = spent(best, instance, limits or few)
            ratios.append(found.value / base[name])
            cpus.append(cpu)
        figures = known["giph_140_episodes_307_cpu_s"], known["heft_plus_hillclimb_2n"]
        means = float(np.mean(ratios)), float(np.mean(cpus))
        yield Row(f"mean of {len(base)}, {words}", "best", *means, *figures)


def references(folder: Path) -> Mapping[str, Any]:
    """The figures of others."""
    read: Mapping[str, Any] = json.loads((folder / "reference_values.json").read_text())
    return read


def _placement(placer: Placer[Any], instance: GivenInstance) -> Any:
    return placer(instance, Limits(evaluations=1), np.random.default_rng(0)).placement


FORMS: dict[str, Callable[[Path, Limits], Iterator[Row]]] = {
    "dnn-partitioning": dnn_partitioning,
    "piper": pipelines,
    "doppler": dataflows,
    "giph": networks,
}


def compile_all(folder: Path) -> None:
    """Run every placer once on a small problem, so that nothing compiles in a search."""
    few = Limits(seconds=0.1)
    graphs = given(folder / "dnn_partitioning_graphs.json")
    smallest = min(graphs.values(), key=lambda one: len(one.graph.groups))
    for placer in (contiguous, scattered):
        spent(placer, smallest, few)
    spent(piper, given(folder / "piper_graphs.json")[BERT], few)
    for file in ("doppler_graphs.json", "giph_small8dev.json"):
        spent(best, next(iter(given(folder / file).values())), Limits(seconds=0.3))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--public-data", type=Path, default=DATA.parent)
    parser.add_argument("--seconds", type=float, default=5.0, help="wall seconds of a search")
    parser.add_argument("--only", nargs="+", choices=tuple(FORMS), default=list(FORMS))
    options = parser.parse_args()
    folder = options.public_data / "op_graphs"
    if not folder.exists():
        raise SystemExit(f"{folder} is absent: the published op graphs are needed")
    compile_all(folder)
    console = Console(width=120)
    for form in options.only:
        table = Table(
            *("problem", "placer", "ours", "published", "target", "bound", "met", "CPU s"),
            title=f"{form}, {options.seconds:g} s a search",
        )
        for row in FORMS[form](folder, Limits(seconds=options.seconds)):
            table.add_row(*row.cells)
        console.print(table)


if __name__ == "__main__":
    main()
