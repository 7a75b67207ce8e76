"""Trials run apart, are kept at once, and are not run twice."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from rlplace.bench import runner
from rlplace.bench.runner import Contest, compete, read_results
from rlplace.bench.suites import suite
from rlplace.bench.types import Problem, Trial
from rlplace.errors import InputError
from rlplace.plan.types import Instance
from rlplace.plan.uniform import uniform_plan
from rlplace.planners.costing import Costing
from rlplace.planners.exhaustive import exhaustive
from rlplace.planners.grid import grid
from rlplace.planners.search import Search
from rlplace.planners.types import Budget, PlannerResult

_BUDGET = Budget(30.0, 50)


def _one(instance: Instance, budget: Budget, costing: Costing | None) -> Search:
    """A search that has offered one plan that fits: the first of the tiny instance on a device."""
    search = Search("one", costing or Costing(instance), budget)
    search.offer(uniform_plan(instance, devices=(0,)))
    return search


def _stuck(
    instance: Instance, budget: Budget, rng: np.random.Generator, costing: Costing | None = None
) -> PlannerResult:
    search = _one(instance, budget, costing)
    time.sleep(600)
    return search.result()


def _dies(
    instance: Instance, budget: Budget, rng: np.random.Generator, costing: Costing | None = None
) -> PlannerResult:
    _one(instance, budget, costing)
    os._exit(7)


def _refuses(
    instance: Instance, budget: Budget, rng: np.random.Generator, costing: Costing | None = None
) -> PlannerResult:
    raise InputError("tp", 3, "is odd", 2)


def test_trials_are_what_planners_find_and_are_not_run_again(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    contest = Contest(suite("tiny", 3), {"grid": grid, "exhaustive": exhaustive}, _BUDGET)
    seen: list[tuple[int, int]] = []
    trials = compete(contest, path, 2, lambda done, total: seen.append((done, total)))
    assert [(t.key.problem, t.key.planner) for t in trials] == [
        (problem.name, name) for problem in contest.problems for name in contest.planners
    ]
    assert seen == [(done, 6) for done in range(7)]
    for trial, (_, problem, planner) in zip(trials, contest.trials(), strict=True):
        assert isinstance(problem, Problem)
        found = problem.solve(planner, _BUDGET, 0)
        assert found.estimate is not None
        expected = None if found.plan is None else found.estimate.step_time
        assert trial.step_time == expected
        assert trial.evaluations == found.evaluations
        assert [time for _, time in trial.curve] == [time for _, time in found.curve]
        assert trial.bound is not None
        assert expected is None or trial.bound <= expected
    assert sum(trial.step_time is not None for trial in trials) >= 5
    assert {trial.key: trial for trial in read_results(path)} == {t.key: t for t in trials}
    again = compete(Contest(contest.problems, contest.planners, _BUDGET), path)
    assert again == trials
    assert len(path.read_text().splitlines()) == 6


def test_an_interrupted_comparison_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    contest = Contest(suite("tiny", 2), {"grid": grid}, _BUDGET)
    first, second = compete(contest, path)
    path.write_text(first.line() + "\n" + second.line()[:40])
    assert read_results(path) == [first]
    found = compete(contest, path)
    assert found[0] == first
    assert found[1].step_time == second.step_time
    assert len(read_results(path)) == 2


def test_another_budget_or_seed_is_another_trial(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    contest = Contest(suite("tiny", 1), {"grid": grid}, _BUDGET)
    compete(contest, path)
    compete(replace(contest, seed=1), path)
    compete(replace(contest, budget=Budget(30.0, 51)), path)
    assert len(read_results(path)) == 3


def test_what_does_not_end_is_killed_and_keeps_its_best(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "_GRACE", 5.0)
    problems = suite("tiny", 1)
    contest = Contest(problems, {"stuck": _stuck, "grid": grid}, Budget(0.5))
    stuck, after = compete(contest, tmp_path / "results.jsonl")
    assert stuck.stopped == "killed"
    plan = uniform_plan(problems[0].instance, devices=(0,))
    estimate = Costing(problems[0].instance).estimator.estimate(plan)
    assert estimate.feasible
    assert stuck.step_time == estimate.step_time
    assert after.stopped in ("done", "seconds")


def test_what_fails_is_told(tmp_path: Path) -> None:
    contest = Contest(suite("tiny", 1), {"dies": _dies, "refuses": _refuses}, _BUDGET)
    dies, refuses = compete(contest, tmp_path / "results.jsonl")
    assert (dies.stopped, refuses.stopped) == ("failed", "failed")
    assert "exit code 7" in dies.error
    assert dies.step_time is not None, "it had told of a plan"
    assert "is odd" in refuses.error
    assert refuses.step_time is None


def test_a_line_says_all_of_a_trial() -> None:
    key = next(Contest(suite("tiny", 1), {"grid": grid}, _BUDGET).trials())[0]
    trial = Trial(key, 1.5, 0.0, 0.5, 2.0, 1.0, 7, "done", (3,), ((0.1, 2.0), (0.2, 1.5)), "")
    assert Trial.parse(trial.line()) == trial
