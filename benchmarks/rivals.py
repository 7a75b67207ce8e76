"""How much the overlap-aware program beats each other planner, on uniform and on mixed clusters.

Problems of the suite `real`, spread over its models and clusters; each planner has the same budget.
Ratios are the step time of the rival's plan over that of `overlap`'s, on the problems on which both
found one that fits: geometric mean, most, and least (below 1 the rival is better). An interrupted
run goes on where it was.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import nan
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from rlplace.bench.planners import planners
from rlplace.bench.real import CLUSTERS, FAMILIES, pairs
from rlplace.bench.runner import Contest, compete
from rlplace.bench.suites import suite
from rlplace.bench.types import Problem, Trial
from rlplace.cluster.short import parse_cluster
from rlplace.planners.types import Budget

OURS = "overlap"
#: It has no factor in common with the number of problems, so all come once, clusters in turn.
_STRIDE = 11
#: A rival is told of where it is better by more than this.
_BETTER = 0.01


@dataclass(frozen=True)
class Rival:
    """A planner against `OURS`.

    Args:
        planner: Its name.
        both: Problems on which both found a plan that fits.
        none, ours_none: Problems on which only it found none, and on which only ours did.
        mean, most, least: Of the ratios of step times.
        better: Problems on which it is better by more than 1 %, with the ratio.
    """

    planner: str
    both: int
    none: int
    ours_none: int
    mean: float
    most: float
    least: float
    better: tuple[tuple[str, float], ...]


def problems(mixed: bool, count: int) -> list[Problem]:
    """So many problems of clusters with several kinds of devices, or with one."""
    wanted = {name for name, _, cluster in pairs(FAMILIES) if _mixed(cluster) == mixed}
    asked = [problem for problem in suite("real") if problem.name in wanted]
    places = (index * _STRIDE % len(asked) for index in range(min(count, len(asked))))
    return [asked[place] for place in places]


def _mixed(cluster: str) -> bool:
    return len(parse_cluster(CLUSTERS[cluster]).kinds) > 1


def rivals(trials: Sequence[Trial]) -> list[Rival]:
    """A line for each planner, the nearest first."""
    times: dict[str, dict[str, float | None]] = {}
    for trial in trials:
        times.setdefault(trial.key.planner, {})[trial.key.problem] = trial.step_time
    ours = times.pop(OURS)
    found = [_rival(planner, own, ours) for planner, own in times.items()]
    return sorted(found, key=lambda rival: (np.isnan(rival.mean), rival.mean))


def _rival(planner: str, own: dict[str, float | None], ours: dict[str, float | None]) -> Rival:
    ratios, none, ours_none = {}, 0, 0
    for problem, mine in ours.items():
        other = own[problem]
        if mine is not None and other is not None:
            ratios[problem] = other / mine
        none += mine is not None and other is None
        ours_none += mine is None and other is not None
    values = np.array(list(ratios.values()))
    mean, most, least = (
        (float(np.exp(np.log(values).mean())), float(values.max()), float(values.min()))
        if ratios
        else (nan, nan, nan)
    )
    better = tuple(item for item in ratios.items() if item[1] < 1.0 - _BETTER)
    return Rival(planner, len(ratios), none, ours_none, mean, most, least, better)


def table_of(found: Sequence[Rival], title: str) -> Table:
    """A line a rival."""
    table = Table(title=title)
    for head in ("planner", "both", "only it none", "only ours none", "mean", "most", "least"):
        table.add_column(head, justify="left" if head == "planner" else "right")
    for one in found:
        counts = (one.both, one.none, one.ours_none)
        ratios = (f"{value:.3f}" for value in (one.mean, one.most, one.least))
        table.add_row(one.planner, *map(str, counts), *ratios)
    return table


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("clusters", nargs="?", choices=("uniform", "mixed"), default="mixed")
    parser.add_argument("--planner", nargs="+", default=["all"])
    parser.add_argument("--count", type=int, default=24, help="problems")
    parser.add_argument("--seconds", type=float, default=15.0, help="wall seconds of a search")
    parser.add_argument("--evaluations", type=int, default=2000, help="plans of a search")
    parser.add_argument("--workers", type=int, default=1, help="searches at a time")
    parser.add_argument("--out", type=Path, default=Path("out/bench/rivals.jsonl"))
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    asked = planners([OURS, *(name for name in args.planner if name != OURS)])
    budget = Budget(args.seconds, args.evaluations)
    trials: list[Trial] = []
    with Progress(console=Console(stderr=True)) as bar:
        own = problems(args.clusters == "mixed", args.count)
        for problem in bar.track(own, description="problems"):
            trials += compete(Contest([problem], asked, budget), args.out, args.workers)
    found = rivals(trials)
    if args.json:
        print(json.dumps([asdict(one) for one in found], indent=1))
        return
    console = Console()
    console.print(table_of(found, f"Step time over that of {OURS}, {args.clusters} clusters"))
    for one in found:
        for name, ratio in one.better:
            console.print(f"{one.planner} is better on {name}: {ratio:.4f}")


if __name__ == "__main__":
    main()
