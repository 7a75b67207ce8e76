"""What is compared: problems, and what a planner made of one."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import numpy as np

from rlplace.cost.analytic import AnalyticCost
from rlplace.cost.types import CostModel
from rlplace.plan.types import Instance
from rlplace.planners.costing import Costing
from rlplace.planners.types import Budget, Planner, PlannerResult
from rlplace.simulate.bound import bound


class Question(Protocol):
    """A problem of a suite, whatever form it has."""

    @property
    def suite(self) -> str:
        """Name of the suite."""
        ...

    @property
    def name(self) -> str:
        """Unique in the suite."""
        ...

    @property
    def fingerprint(self) -> str:
        """Hash of all that the question consists of."""
        ...

    def solvers(
        self, planners: Mapping[str, Planner], placers: Collection[str]
    ) -> Mapping[str, Any]:
        """Those that can answer it, by name.

        Args:
            planners: Planners of instances, by name.
            placers: Names of placers of public forms.
        """
        ...

    def trial(self, key: Key, solver: Any, budget: Budget) -> Trial:
        """What one of its solvers makes of it."""
        ...


@dataclass(frozen=True)
class Problem:
    """An instance of a suite.

    Args:
        suite: Name of the suite.
        name: Unique in the suite.
        make: Makes the instance; a capture may take seconds, so it is made when it is needed.
        cost: Makes the cost model; a profile's own, where it has one.
    """

    suite: str
    name: str
    make: Callable[[], Instance]
    cost: Callable[[], CostModel] = AnalyticCost

    @cached_property
    def instance(self) -> Instance:
        """The question."""
        return self.make()

    @property
    def formula(self) -> bool:
        """Whether it is costed by formula, for which alone there is a proved bound."""
        return self.cost is AnalyticCost

    @cached_property
    def fingerprint(self) -> str:
        """Hash of all that the question consists of."""
        own = self.instance
        asked = {
            "graph": own.graph.fingerprint,
            "cluster": own.cluster.fingerprint,
            "framework": asdict(own.execution),
            **{
                name: getattr(own, name)
                for name in own.__dataclass_fields__
                if name not in ("graph", "cluster", "framework")
            },
        }
        text = json.dumps([self.suite, self.name, asked], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def solve(self, planner: Planner, budget: Budget, seed: int) -> PlannerResult:
        """What a planner finds; the seed and the name of the problem give the random numbers."""
        rng = np.random.default_rng((seed, salt_of(self.name)))
        return planner(self.instance, budget, rng, Costing(self.instance, self.cost()))

    def solvers(
        self, planners: Mapping[str, Planner], placers: Collection[str]
    ) -> Mapping[str, Planner]:
        """All planners."""
        return planners

    def trial(self, key: Key, solver: Planner, budget: Budget) -> Trial:
        """What a planner makes of it."""
        cpu = time.process_time()
        result = self.solve(solver, budget, key.seed)
        spent = time.process_time() - cpu
        fits = result.plan is not None and result.estimate is not None
        return Trial(
            key,
            step_time=result.estimate.step_time if fits and result.estimate else None,
            overflow=result.overflow,
            seconds=result.seconds,
            cpu_seconds=spent,
            evaluations=result.evaluations,
            stopped=result.stopped,
            idle=result.idle,
            curve=result.curve,
            bound=bound(self.instance) if self.formula else None,
        )


def salt_of(name: str) -> int:
    """What tells the random numbers of a problem apart from those of others."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:4])


class Key(NamedTuple):
    """Which trial it is: what was asked, of whom, and with what budget."""

    suite: str
    problem: str
    fingerprint: str
    planner: str
    most_seconds: float
    most_evaluations: int
    seed: int


@dataclass(frozen=True)
class Trial:
    """What a planner made of a problem.

    Args:
        key: Which trial.
        step_time: Seconds a step of the best plan, or the value of the best placement by the rule
            of its form; None if none was found that fits.
        overflow: Of the least overfull plan, where none fits (share of the limit).
        bound: Proved lower limit of the step time; None where there is none.
        seconds: Wall seconds.
        cpu_seconds: CPU seconds.
        evaluations: Plans that were estimated.
        stopped: Why it stopped: ``done``, ``seconds``, ``evaluations``, ``killed`` (it did not end
            in time, and this is the best that it had told of) or ``failed``.
        idle: Devices that the plan leaves idle.
        curve: (seconds, step time) at each improvement.
        error: What was raised, where it failed.
    """

    key: Key
    step_time: float | None = None
    overflow: float = 0.0
    bound: float | None = None
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    evaluations: int = 0
    stopped: str = "done"
    idle: tuple[int, ...] = ()
    curve: tuple[tuple[float, float], ...] = field(default_factory=tuple)
    error: str = ""

    def line(self) -> str:
        """As a line of a result file."""
        own = {name: getattr(self, name) for name in self.__dataclass_fields__ if name != "key"}
        return json.dumps({**self.key._asdict(), **own})

    @staticmethod
    def parse(line: str) -> Trial:
        """A trial from a line of a result file."""
        read: dict[str, Any] = json.loads(line)
        key = Key(*(read.pop(name) for name in Key._fields))
        read["idle"] = tuple(read["idle"])
        read["curve"] = tuple((seconds, time) for seconds, time in read["curve"])
        return Trial(key, **read)
