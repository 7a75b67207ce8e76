"""``rlplace bench``: planners side by side on suites of problems."""

from __future__ import annotations

import json as jsonlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import tyro
from rich.console import Console, Group

#: What is compared where nobody says: all that answer every instance, and what places best.
_PLANNERS = ("data_parallel", "zero3", "grid", "overlap", "anneal", "portfolio", "policy")
_PLACERS = ("heft", "best", "contiguous", "scattered", "piper", "sailor")
_MANY = 1_000_000_000


def bench(
    suites: tyro.conf.Positional[list[str]],
    *,
    planner: list[str] = [*_PLANNERS, *_PLACERS],  # noqa: B006  # tyro reads it, nobody writes to it
    count: int | None = None,
    seconds: float = 10.0,
    evaluations: int = _MANY,
    workers: int | None = None,
    seed: int = 0,
    out: Path = Path("out/bench/results.jsonl"),
    public_data: Path | None = None,
    curves: Path | None = None,
    markdown: Path | None = None,
    track: bool = False,
    json: bool = False,
) -> int:
    """Compare planners on suites of problems; run it again to go on with what was interrupted.

    Gaps are step time / best known - 1, the best of all trials of a problem in the result file.

    Args:
        suites: tiny, random, real, dag, random-dev or public.
        planner: Names of planners; policy is the shipped one, and all means every one there is.
            Those of placers are for the op graphs of public, and left out elsewhere.
        count: Problems of each suite, spread over it; by default all.
        seconds: Wall seconds of a planner for a problem; one that takes twice as long, and a
            minute, is killed and counts with the best plan that it told of.
        evaluations: Plans that a planner may estimate for a problem.
        workers: Trials at a time; by default one for each core but one.
        seed: Of all randomness.
        out: Result file, a line of JSON for each trial; trials that it has are not run again.
        public_data: Folder with the data of public: op_graphs and profiles.
        curves: Draw the gap over the seconds here (PNG, SVG or PDF).
        markdown: Write a page here: how planners did on each suite, and what they are.
        track: Log the table to Weights & Biases.
        json: Print one JSON object.
    """
    from rlplace.bench.curves import draw_curves
    from rlplace.bench.markdown import page
    from rlplace.bench.placements import ALL_PLACERS
    from rlplace.bench.planners import placers, planners
    from rlplace.bench.runner import Contest, compete
    from rlplace.bench.standings import render_standings, standings, standings_data
    from rlplace.bench.suites import questions
    from rlplace.planners.types import Budget

    problems = [one for name in suites for one in questions(name, count, public_data)]
    budget = Budget(seconds, evaluations)
    contest = Contest(problems, planners(planner), budget, seed, placers(planner))
    most = evaluations if evaluations < _MANY else None
    options = {"count": count, "seconds": seconds, "evaluations": most, "seed": seed}
    with _progress(quiet=json) as told:
        trials = compete(contest, out, workers or max(1, (os.cpu_count() or 2) - 1), told)
    found = standings(trials)
    if curves is not None:
        draw_curves(trials, curves)
    if markdown is not None:
        markdown.parent.mkdir(parents=True, exist_ok=True)
        paths = {"public-data": public_data, "markdown": markdown}
        again = _command(suites, planner, {**options, **paths})
        known: dict[str, Callable[..., Any]] = {**ALL_PLACERS, **contest.planners}
        ran = {one.planner: known[one.planner] for one in found}
        markdown.write_text(page(found, ran, again), encoding="utf-8")
    if track:
        _track(standings_data(found), out.parent)
    if json:
        print(jsonlib.dumps({"results": str(out), "standings": standings_data(found)}, indent=1))
    else:
        Console().print(Group(*render_standings(found)))
    return 0


@contextmanager
def _progress(quiet: bool) -> Iterator[Callable[[int, int], None]]:
    """A bar on stderr."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

    if quiet:
        yield lambda done, total: None
        return
    columns = ("trials", BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("")
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _command(suites: list[str], planner: list[str], options: dict[str, object]) -> str:
    """The line that writes the page again."""
    given = [f"--{name} {value}" for name, value in options.items() if value is not None]
    return " ".join(["rlplace bench", *suites, "--planner", *planner, *given])


def _track(rows: list[dict[str, Any]], folder: Path) -> None:
    from rlplace.policies.tracking import Tracker

    tracker = Tracker(folder, "bench", {"trials": len(rows)})
    tracker.table("standings", list(rows[0]), [list(row.values()) for row in rows])
    tracker.finish()
