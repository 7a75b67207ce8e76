"""Zero-shot planning: roll the builder out under a policy, many plans at a time.

The first rollout is greedy. The next ones take the best other first decisions (micro-batch count
and device order decide most) and go on greedily; the rest are sampled. All rollouts move in step,
so the candidates of all of them are scored in one forward pass, and rollouts that have made the
same choices so far share their state.

Decision space: the builder's; of `stagewise` contiguous stages on runs of the order of islands,
each with its own mesh shape, and the micro-batch count; `StageSolver` makes the choices inside.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from rlplace.envs.types import Builder, FloatArray
from rlplace.plan.types import Instance
from rlplace.planners.costing import Costing
from rlplace.planners.search import Search
from rlplace.planners.types import Budget, Planner, PlannerResult
from rlplace.policies.types import ScoreNetwork

Path = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RolloutConfig:
    """How many plans a policy proposes.

    Args:
        first_choices: Greedy rollouts, each from another first decision, the best ones first.
        samples: Sampled rollouts after these.
        temperature: Of the samples; 1 is the policy itself.
        batch: Rollouts that move in step; the budget is looked at between batches.
    """

    first_choices: int = 8
    samples: int = 16
    temperature: float = 1.0
    batch: int = 4


@dataclass
class Rollouts:
    """Rolls a builder out under a policy.

    Args:
        net: The policy; it encodes the instance once.
        builder: The decision process.
        instance: The question.
        rng: Source of the samples.
    """

    net: ScoreNetwork
    builder: Builder
    instance: Instance
    rng: np.random.Generator

    def __post_init__(self) -> None:
        start = self.builder.start(self.instance)
        self._states: dict[Path, Any] = {(): start}
        self._log_probs: dict[Path, FloatArray] = {}
        self._encoding = self.net.encode(self.builder.view(start))

    def greedy(self) -> Path:
        """The choices of the plan that is most likely, decision after decision."""
        return self.run([()], 0.0)[0]

    def first_choices(self, count: int) -> list[Path]:
        """The `count` most likely first decisions, the best first."""
        if self.builder.done(self._states[()]):
            return [()]
        log_probs = self.log_probs(())
        order = np.argsort(-log_probs, kind="stable")[:count]
        return [(int(index),) for index in order if np.isfinite(log_probs[index])]

    def run(self, paths: list[Path], temperature: float) -> list[Path]:
        """Go on from some choices until the plans are complete; temperature 0 is greedy."""
        finished: dict[int, Path] = {}
        active = dict(enumerate(paths))
        while active:
            for slot, path in list(active.items()):
                if self.builder.done(self.state(path)):
                    finished[slot] = active.pop(slot)
            self._score(sorted({path for path in active.values() if path not in self._log_probs}))
            for slot, path in active.items():
                active[slot] = (*path, self._choose(self._log_probs[path], temperature))
        return [finished[slot] for slot in range(len(paths))]

    def state(self, path: Path) -> Any:
        """The builder's state after some choices."""
        if path not in self._states:
            self._states[path] = self.builder.apply(self.state(path[:-1]), path[-1])
        return self._states[path]

    def log_probs(self, path: Path) -> FloatArray:
        """Of the candidates for the next decision; minus infinity where illegal."""
        if path not in self._log_probs:
            self._score([path])
        return self._log_probs[path]

    def _score(self, paths: list[Path]) -> None:
        by_step: dict[int, list[Path]] = {}
        for path in paths:
            by_step.setdefault(len(path), []).append(path)
        for step, group in by_step.items():
            candidates = [self.builder.candidates(self.state(path)) for path in group]
            scored = self.net.score(self._encoding, candidates, step)
            self._log_probs.update(zip(group, scored, strict=True))

    def _choose(self, log_probs: FloatArray, temperature: float) -> int:
        if temperature == 0.0:
            return int(np.argmax(log_probs))
        noise = self.rng.gumbel(size=log_probs.shape)
        return int(np.argmax(log_probs / temperature + noise))


def proposals(rollouts: Rollouts, config: RolloutConfig) -> Iterator[list[Path]]:
    """Distinct complete plans as choices, batch after batch; the first is the greedy one."""
    seen: set[Path] = set()

    def fresh(paths: list[Path]) -> list[Path]:
        new = [path for path in dict.fromkeys(paths) if path not in seen]
        seen.update(new)
        return new

    yield fresh([rollouts.greedy()])
    first = rollouts.first_choices(config.first_choices)[1:]
    for start in range(0, len(first), config.batch):
        yield fresh(rollouts.run(first[start : start + config.batch], 0.0))
    for start in range(0, config.samples, config.batch):
        count = min(config.batch, config.samples - start)
        yield fresh(rollouts.run([()] * count, config.temperature))


def policy_planner(
    net: ScoreNetwork,
    builder: Builder,
    config: RolloutConfig | None = None,
    name: str = "policy",
) -> Planner:
    """A planner that proposes plans by a policy and keeps the best; nothing else helps it.

    Args:
        net: The policy (trained, or `rlplace.policies.network.untrained`).
        builder: The decision process that it was trained on.
        config: How many plans it proposes.
        name: Name in results.

    Returns:
        The planner. It stops between batches of plans; the greedy plan is always completed. The
        seconds of its result are the policy's own, encoding and estimates included.
    """
    chosen = config or RolloutConfig()

    def plan(
        instance: Instance,
        budget: Budget,
        rng: np.random.Generator,
        costing: Costing | None = None,
    ) -> PlannerResult:
        search = Search(name, costing or Costing(instance), budget)
        rollouts = Rollouts(net, builder, instance, rng)
        for paths in proposals(rollouts, chosen):
            for path in paths:
                if search.stopped and search.evaluations:
                    return search.result()
                search.offer(builder.plan(rollouts.state(path)))
            if search.stopped:
                break
        return search.result()

    return plan
