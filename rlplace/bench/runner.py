"""Runs planners on problems, each trial in a process of its own, and keeps what is done.

A trial that does not end in time is killed, and counts with the best plan that it told of. What is
done is appended to the result file at once, so that an interrupted comparison goes on where it was.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any

from rlplace.bench.types import Key, Question, Trial
from rlplace.errors import RlplaceError
from rlplace.planners.types import Budget, Planner

#: Seconds beyond a planner's budget, and times the budget, after which it is killed.
_GRACE, _TIMES = 60.0, 2.0
_CONTEXT = multiprocessing.get_context("fork")


@dataclass(frozen=True)
class Contest:
    """What is compared.

    Args:
        problems: The problems.
        planners: By name, for those problems that ask for a plan.
        budget: Of each planner on each problem.
        seed: Of all randomness.
        placers: Names, for those problems that ask for a placement.
    """

    problems: Sequence[Question]
    planners: dict[str, Planner]
    budget: Budget
    seed: int = 0
    placers: Sequence[str] = ()

    def trials(self) -> Iterator[tuple[Key, Question, Any]]:
        """All of them, problem by problem, each with the planner or placer."""
        for problem in self.problems:
            for name, solver in problem.solvers(self.planners, self.placers).items():
                yield self._key(problem, name), problem, solver

    def _key(self, problem: Question, planner: str) -> Key:
        return Key(
            problem.suite,
            problem.name,
            problem.fingerprint,
            planner,
            self.budget.seconds,
            self.budget.evaluations,
            self.seed,
        )


def read_results(path: Path) -> list[Trial]:
    """The trials of a result file; a last line that was not written out is left off."""
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    return [Trial.parse(line) for line in lines if line.endswith("\n")]


def compete(
    contest: Contest,
    path: Path,
    workers: int = 1,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[Trial]:
    """Run the trials that a result file lacks.

    Args:
        contest: What is compared.
        path: The result file (JSON lines).
        workers: Trials at a time.
        progress: Told how many trials are done, of how many.

    Returns:
        The trials of the contest, old and new, in its order.
    """
    known = {trial.key: trial for trial in read_results(path)}
    wanted = list(contest.trials())
    missing = [one for one in wanted if one[0] not in known]
    done = len(wanted) - len(missing)
    progress(done, len(wanted))
    path.parent.mkdir(parents=True, exist_ok=True)
    _drop_torn_line(path)
    with path.open("a", encoding="utf-8") as file:
        for trial in _run(missing, contest, workers):
            known[trial.key] = trial
            file.write(trial.line() + "\n")
            file.flush()
            done += 1
            progress(done, len(wanted))
    return [known[key] for key, _, _ in wanted]


def _drop_torn_line(path: Path) -> None:
    """Cut off a line that an interruption left unfinished, so that the next one stands alone."""
    if path.exists() and (text := path.read_text(encoding="utf-8")) and not text.endswith("\n"):
        path.write_text(text[: text.rfind("\n") + 1], encoding="utf-8")


@dataclass
class _Running:
    """A trial in its process, with the best that it has told of."""

    key: Key
    process: ForkProcess
    pipe: Connection
    deadline: float
    started: float = field(default_factory=time.perf_counter)
    curve: list[tuple[float, float]] = field(default_factory=list)

    def receive(self) -> Trial | None:
        """The next message; the trial once it is over."""
        try:
            message = self.pipe.recv()
        except EOFError:
            self.process.join()
            return self.cut_short("failed", f"ended with exit code {self.process.exitcode}")
        if isinstance(message, Trial):
            return message
        if not self.curve or message[1] < self.curve[-1][1]:
            self.curve.append(message)
        return None

    def cut_short(self, stopped: str, error: str = "") -> Trial:
        """What is known of a trial that did not end by itself."""
        return Trial(
            self.key,
            step_time=self.curve[-1][1] if self.curve else None,
            seconds=time.perf_counter() - self.started,
            stopped=stopped,
            curve=tuple(self.curve),
            error=error,
        )

    def end(self) -> None:
        """End the process, whatever it does."""
        self.process.kill()
        self.process.join()
        self.pipe.close()


def _run(
    missing: list[tuple[Key, Question, Any]], contest: Contest, workers: int
) -> Iterator[Trial]:
    limit = _TIMES * contest.budget.seconds + _GRACE
    waiting = list(reversed(missing))
    running: list[_Running] = []
    try:
        while waiting or running:
            while waiting and len(running) < workers:
                key, problem, solver = waiting.pop()
                running.append(_start(key, problem, solver, contest, limit))
            first = min(one.deadline for one in running)
            left = None if first == float("inf") else max(0.0, first - time.perf_counter())
            ready = wait([one.pipe for one in running], timeout=left)
            for one in list(running):
                over = one.receive() if one.pipe in ready else None
                if over is None and time.perf_counter() > one.deadline:
                    over = one.cut_short("killed")
                if over is not None:
                    one.end()
                    running.remove(one)
                    yield over
    finally:
        for one in running:
            one.end()


def _start(key: Key, problem: Question, solver: Any, contest: Contest, limit: float) -> _Running:
    mine, other = _CONTEXT.Pipe(duplex=False)
    process = _CONTEXT.Process(
        target=_solve, args=(other, key, problem, solver, contest), daemon=True
    )
    process.start()
    other.close()
    return _Running(key, process, mine, time.perf_counter() + limit)


def _solve(pipe: Connection, key: Key, problem: Question, solver: Any, contest: Contest) -> None:
    """The body of a trial's process."""
    budget = replace(contest.budget, told=lambda _, found, at: pipe.send((at, found.step_time)))
    cpu = time.process_time()
    try:
        trial = problem.trial(key, solver, budget)
    except (RlplaceError, ArithmeticError, LookupError, TypeError, ValueError) as error:
        text = f"{type(error).__name__}: {error}"
        trial = Trial(key, stopped="failed", cpu_seconds=time.process_time() - cpu, error=text)
    pipe.send(trial)
    pipe.close()
