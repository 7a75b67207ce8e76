"""The public suite: all that is published, under its own costs, read from a folder."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from rlplace.bench.placements import ALL_PLACERS, PlacementProblem
from rlplace.bench.planners import placers, planners
from rlplace.bench.public import SAILOR, public
from rlplace.bench.runner import Contest, compete
from rlplace.bench.standings import standings
from rlplace.bench.suites import questions
from rlplace.bench.types import Problem
from rlplace.cli import OK
from rlplace.commands.bench import bench
from rlplace.cost.given import makespan_bound
from rlplace.errors import InputError
from rlplace.graph.formats.types import GivenInstance
from rlplace.planners.given.heft import heft
from rlplace.planners.types import Budget
from tests.graph.formats.examples import SHARED
from tests.planners.given.cases import random_doppler

DATA = SHARED.parent


def made(seed: int = 0) -> PlacementProblem:
    def make() -> GivenInstance:
        return random_doppler(np.random.default_rng(seed), 12, 3)

    return PlacementProblem("public doppler", f"random {seed}", make)


def test_placements_are_trials_like_plans_and_are_not_run_again(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    names = ["heft", "best", "galvatron", "scattered"]
    plan = questions("tiny", 1, None)
    budget = Budget(30.0, 400)
    contest = Contest([made(), *plan], planners(["grid"]), budget, 0, placers(names))
    trials = compete(contest, path)
    asked = [(trial.key.suite, trial.key.planner) for trial in trials]
    assert asked == [("public doppler", "heft"), ("public doppler", "best"), ("tiny", "grid")]
    list_schedule, best, _ = trials
    found = heft(random_doppler(np.random.default_rng(0), 12, 3), budget, np.random.default_rng(0))
    assert list_schedule.step_time == found.value
    assert best.step_time is not None
    assert best.step_time <= found.value
    assert best.bound == makespan_bound(random_doppler(np.random.default_rng(0), 12, 3))
    assert [value for _, value in best.curve][-1] == best.step_time
    rows = {(one.suite, one.planner): one for one in standings(trials)}
    assert rows["public doppler", "best"].mean == 0.0
    assert rows["public doppler", "heft"].mean == found.value / best.step_time - 1.0
    text = path.read_text()
    assert compete(contest, path) == trials
    assert path.read_text() == text


def test_fingerprints_are_of_the_costs() -> None:
    one = made()
    other = replace(one, make=lambda: random_doppler(np.random.default_rng(1), 12, 3))
    assert one.fingerprint == made().fingerprint
    assert one.fingerprint != other.fingerprint


def test_names_of_placers_and_planners() -> None:
    assert set(planners(["heft", "anneal", "grid"])) == {"anneal", "grid"}
    assert placers(["heft", "anneal", "grid"]) == ("heft", "anneal")
    assert placers(["all"]) == tuple(ALL_PLACERS)
    assert "sailor" in ALL_PLACERS
    with pytest.raises(InputError, match="heft"):
        placers(["hefd"])


def test_a_folder_that_is_not_given_or_lacks_something_is_told(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="must be the folder"):
        bench(["public"], out=tmp_path / "results.jsonl")
    (tmp_path / "op_graphs").mkdir()
    (tmp_path / "op_graphs" / "giph_small8dev.json").write_text("{}")
    with pytest.raises(InputError, match=r"lacks op_graphs/dnn.*profiles/sailor") as told:
        questions("public", 2, tmp_path)
    assert "giph" not in str(told.value)


def test_all_that_is_published_is_asked() -> None:
    if not DATA.exists():
        pytest.skip(f"{DATA} is absent")
    problems = tuple(public(DATA))
    sizes = Counter(problem.suite.removeprefix("public ") for problem in problems)
    assert sizes == {
        "dnn-partitioning": 24,
        "piper": 4,
        "doppler": 6,
        "giph": 12,
        "sailor": len(SAILOR),
        "galvatron": 2,
        "aceso": 5,
    }
    assert len({(problem.suite, problem.name) for problem in problems}) == len(problems)
    assert len({problem.fingerprint for problem in problems}) == len(problems)
    every = planners(["grid"]), placers(["all"])
    assert all(problem.solvers(*every) for problem in problems)
    assert not any(one.formula for one in problems if isinstance(one, Problem))


def test_the_command_compares_each_form(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if not DATA.exists():
        pytest.skip(f"{DATA} is absent")
    given = {"count": 5, "evaluations": 20, "seconds": 60.0, "public_data": DATA, "json": True}
    out, page = tmp_path / "results.jsonl", tmp_path / "page.md"
    names = ["grid", "heft", "contiguous"]
    assert bench(["public"], planner=names, out=out, markdown=page, **given) == OK  # type: ignore[arg-type]  # any
    found = json.loads(capsys.readouterr().out)["standings"]
    assert all(row["failed"] == 0 for row in found)
    graphs = [row for row in found if row["planner"] != "grid"]
    assert len(graphs) >= 2
    assert all(row["infeasible"] == 0.0 for row in graphs)
    assert {row["suite"] for row in found} >= {"public dnn-partitioning", "public aceso"}
    assert "| `contiguous` | " in page.read_text()
    assert f"--public-data {DATA}" in page.read_text()
