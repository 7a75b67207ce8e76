"""What a finished plan is worth: predicted by the cost model, or measured on this machine."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from math import log
from typing import TYPE_CHECKING, Protocol

from rlplace.envs.bank import instance_key
from rlplace.envs.builders.rollouts import greedy_state
from rlplace.envs.builders.stagewise import StagewiseBuilder
from rlplace.errors import InputError
from rlplace.plan.types import Instance, Plan
from rlplace.planners.search import objective
from rlplace.simulate.estimate import Estimator
from rlplace.simulate.types import Estimate

if TYPE_CHECKING:
    from rlplace.runtime.pool import Pool

#: A plan of a simple heuristic, against which rewards are taken.
Baseline = Callable[[Instance], Plan]
_KEPT = 256


@dataclass(frozen=True)
class Outcome:
    """What an episode ended with.

    Args:
        reward: Natural logarithm of the baseline's step time over the plan's, less a price in
            proportion to what does not fit.
        step_time: Seconds of a step, predicted or measured.
        baseline: The same of the baseline.
        estimate: The plan's estimate.
    """

    reward: float
    step_time: float
    baseline: float
    estimate: Estimate


class Reward(Protocol):
    """Scores finished plans."""

    def __call__(self, instance: Instance, plan: Plan) -> Outcome:
        """The outcome of an episode; `plan` is legal for `instance`."""
        ...


def heuristic_plan(instance: Instance) -> Plan:
    """The plan that the stage-wise builder's own heuristic leads to."""
    builder = StagewiseBuilder()
    return builder.plan(greedy_state(builder, instance))


@dataclass
class PredictedReward:
    """Log ratio of predicted step times; an overflow of memory costs in proportion, no cliff.

    Args:
        baseline: Plan of the simple heuristic; looked up once an instance.
    """

    baseline: Baseline = heuristic_plan
    _known: OrderedDict[tuple[object, ...], tuple[Estimator, Estimate]] = field(
        default_factory=OrderedDict
    )

    def __call__(self, instance: Instance, plan: Plan) -> Outcome:
        """See `Reward`."""
        estimator, base = self._base(instance)
        estimate = estimator.estimate(plan)
        gained = objective(instance, base) - objective(instance, estimate)
        return Outcome(gained, estimate.step_time, base.step_time, estimate)

    def _base(self, instance: Instance) -> tuple[Estimator, Estimate]:
        key = instance_key(instance)
        if key not in self._known:
            estimator = Estimator(instance)
            self._known[key] = (estimator, estimator.estimate(self.baseline(instance)))
            if len(self._known) > _KEPT:
                self._known.popitem(last=False)
        self._known.move_to_end(key)
        return self._known[key]


@dataclass
class MeasuredReward:
    """Log ratio of step times measured on this machine's ranks (gloo); seconds an episode.

    Plans that are predicted not to fit are not run: they get the predicted reward. Equal plans
    are measured once. The ranks stay from plan to plan; `close` ends them.

    Args:
        baseline: Plan of the simple heuristic; measured once an instance.
        steps: Measured steps; their median counts.
        warmup: Steps before them.
        limit: Seconds after which a run is given up.
    """

    baseline: Baseline = heuristic_plan
    steps: int = 5
    warmup: int = 2
    limit: float = 120.0
    _measured: dict[str, float] = field(default_factory=dict)
    _pool: Pool | None = None

    def __post_init__(self) -> None:
        self._predicted = PredictedReward(self.baseline)

    def __call__(self, instance: Instance, plan: Plan) -> Outcome:
        """See `Reward`.

        Raises:
            InputError: If the graph does not say how the library builds its model.
            RankFailedError: If a rank failed.
        """
        if not instance.graph.source:
            rule = "a measured reward needs a graph of the library, whose model can be built again"
            raise InputError("graph", instance.graph.name, rule, "rlplace.library.build(...)")
        predicted = self._predicted(instance, plan)
        if not predicted.estimate.feasible:
            return predicted
        own, base = (self._seconds(instance, p) for p in (plan, self.baseline(instance)))
        return Outcome(log(base / own), own, base, predicted.estimate)

    def _seconds(self, instance: Instance, plan: Plan) -> float:
        """Measured seconds of a step."""
        key = repr(plan)
        if key not in self._measured:
            from rlplace.runtime.options import Options

            options = Options(steps=self.steps, warmup=self.warmup)
            pool = self._ranks(len(instance.cluster.devices))
            found = pool.measure(plan, graph=instance.graph, options=options, limit=self.limit)
            self._measured[key] = found.step_time
        return self._measured[key]

    def close(self) -> None:
        """End the ranks; the next plan starts others."""
        if self._pool is not None:
            self._pool.close()

    def _ranks(self, count: int) -> Pool:
        """As many ranks as an instance has devices."""
        from rlplace.runtime.pool import Pool

        if self._pool is None or self._pool.ranks != count:
            self.close()
            self._pool = Pool(count)
        return self._pool
