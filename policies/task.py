"""What is learned: placement with the stage-wise builder, behind a small interface.

`rlplace.policies.train` knows nothing of placement; another decision process is another `Task`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from functools import cached_property
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Protocol

import gymnasium
import numpy as np

from rlplace.envs.bank import InstanceBank
from rlplace.envs.builders.stagewise import StagewiseBuilder
from rlplace.envs.instances import InstanceGenerator
from rlplace.envs.registration import ENV_ID
from rlplace.envs.reward import PredictedReward
from rlplace.plan.types import Instance
from rlplace.planners.search import objective
from rlplace.policies.config import TrainConfig
from rlplace.policies.network import PlaceNet, untrained
from rlplace.policies.planner import Rollouts
from rlplace.policies.records import load_records, save_records
from rlplace.policies.teacher import records_of, search
from rlplace.policies.types import Records, ScoreNetwork, ViewBank
from rlplace.simulate.estimate import Estimator

#: Told how many instances are done, and something for people.
FoundHook = Callable[[int, str], None]

#: Streams of random numbers: instances to imitate, to explore, to judge by.
_IMITATED, _EXPLORED, _JUDGED = 1, 2, 3


class Task(Protocol):
    """What training needs to know of what is learned."""

    @property
    def summary(self) -> str:
        """A few sentences for the card of the policy."""
        ...

    @property
    def bank(self) -> ViewBank:
        """Where the instances of all environments are found."""
        ...

    def environment(self) -> gymnasium.Env[Any, Any]:
        """A new environment; a reset with a seed decides all that follows."""
        ...

    def turn(self, seed: int) -> None:
        """Choose the instances of the next rollout, the same for the same seed."""
        ...

    def records(self, folder: Path, found: FoundHook) -> Records:
        """What is imitated; kept in `folder`, so that nothing is searched twice."""
        ...

    def judge(self, net: PlaceNet) -> dict[str, float]:
        """Figures of a network on held-out instances; ``eval/gap`` decides, smaller is better."""
        ...


@dataclass(frozen=True)
class PlaceTask:
    """Placement of random models on random clusters.

    Args:
        config: Of the run.
    """

    config: TrainConfig
    bank: InstanceBank = field(default_factory=InstanceBank)
    _builder: StagewiseBuilder = field(default_factory=StagewiseBuilder)
    _reward: PredictedReward = field(default_factory=PredictedReward)
    _pool: dict[int, Instance] = field(default_factory=dict)
    _drawn: list[int] = field(default_factory=list)

    @cached_property
    def generator(self) -> InstanceGenerator:
        """Where instances come from."""
        config = self.config
        return InstanceGenerator(
            max_devices=config.max_devices,
            max_groups=config.max_groups,
            mixed_share=config.mixed_share,
        )

    @property
    def summary(self) -> str:
        """For the card."""
        config = self.config
        return (
            f"Trained on {config.instances} random instances ({config.min_devices} to "
            f"{config.max_devices} devices, at most {config.max_groups} groups, "
            f"{config.mixed_share:.0%} of the clusters mixed): imitation of the best of "
            f"{config.teacher.evaluations} plans an instance, searched among the stage-wise "
            f"builder's decisions, then {config.ppo.updates} updates "
            "of MaskablePPO on the predicted step time."
        )

    def instance(self, stream: int, index: int) -> Instance:
        """A random instance of a stream."""
        rng = np.random.default_rng([self.config.seed, stream, index])
        while True:
            instance = self.generator(rng)
            if len(instance.cluster.devices) >= self.config.min_devices:
                return instance

    def environment(self) -> gymnasium.Env[Any, Any]:
        """An environment that draws from the instances of the rollout; all share one builder."""
        env: gymnasium.Env[Any, Any] = gymnasium.make(
            ENV_ID,
            instances=self._draw,
            builder=self._builder,
            reward=self._reward,
            bank=self.bank,
            disable_env_checker=True,
        )
        return env

    def turn(self, seed: int) -> None:
        """Draw `ppo.instances` of the pool."""
        count = min(self.config.ppo.instances, self.config.pool)
        drawn = np.random.default_rng(seed).choice(self.config.pool, count, replace=False)
        self._drawn[:] = drawn.tolist()

    def records(self, folder: Path, found: FoundHook) -> Records:
        """Search what is not on disk yet, in `workers` processes."""
        folder.mkdir(parents=True, exist_ok=True)
        files = [folder / f"{index:05d}.safetensors" for index in range(self.config.instances)]
        missing = [index for index, file in enumerate(files) if not file.exists()]
        done = len(files) - len(missing)
        found(done, "")
        for note in self._search(missing, files):
            done += 1
            found(done, note)
        return Records.join([load_records(file) for file in files])

    def judge(self, net: PlaceNet) -> dict[str, float]:
        """Mean and worst gap of the greedy plans, over the best that a search found."""
        gaps = np.array(
            [self._greedy(net, index) - best for index, best in enumerate(self._best_known)]
        )
        return {"eval/gap": float(gaps.mean()), "eval/worst": float(gaps.max())}

    def _draw(self, rng: np.random.Generator) -> Instance:
        """One of the instances of this rollout (of the pool, before the first one)."""
        number = (
            int(rng.choice(self._drawn)) if self._drawn else int(rng.integers(self.config.pool))
        )
        if number not in self._pool:
            self._pool[number] = self.instance(_EXPLORED, number)
        return self._pool[number]

    def _greedy(self, net: ScoreNetwork, index: int) -> float:
        rollouts, value = self._judged[index]
        fresh = Rollouts(net, rollouts.builder, rollouts.instance, np.random.default_rng(0))
        return value(fresh.state(fresh.greedy()))

    @cached_property
    def _judged(self) -> list[tuple[Rollouts, Callable[[Any], float]]]:
        net, builder = untrained(self.config.network), StagewiseBuilder()
        return [
            searcher(net, builder, self.instance(_JUDGED, index), seed=index)
            for index in range(self.config.judged)
        ]

    @cached_property
    def _best_known(self) -> list[float]:
        file = Path(self.config.folder) / "judged.json"
        if file.exists():
            known: list[float] = json.loads(file.read_text())
            return known
        teacher = self.config.teacher
        best = [min(search(*pair, teacher).values()) for pair in self._judged]
        file.write_text(json.dumps(best))
        return best

    def _search(self, missing: list[int], files: list[Path]) -> Iterator[str]:
        """Search instances; a note on each as it is done."""
        if self.config.workers < 2 or len(missing) < 2:
            for index in missing:
                yield search_file(self.config, index, files[index])
            return
        with ProcessPoolExecutor(self.config.workers, get_context("spawn")) as pool:
            jobs = [pool.submit(search_file, self.config, i, files[i]) for i in missing]
            try:
                for job in as_completed(jobs):
                    yield job.result()
            finally:
                pool.shutdown(cancel_futures=True)


def searcher(
    net: ScoreNetwork, builder: StagewiseBuilder, instance: Instance, seed: int
) -> tuple[Rollouts, Callable[[Any], float]]:
    """Rollouts on an instance, and what a complete state is worth."""
    rollouts = Rollouts(net, builder, instance, np.random.default_rng(seed))
    estimator = Estimator(instance)

    def value(state: Any) -> float:
        return objective(instance, estimator.estimate(builder.plan(state)))

    return rollouts, value


def search_file(config: TrainConfig, index: int, file: Path) -> str:
    """Search one instance and write its records; what was gained over the heuristic."""
    instance = PlaceTask(config).instance(_IMITATED, index)
    rollouts, value = searcher(untrained(config.network), StagewiseBuilder(), instance, index)
    found = search(rollouts, value, config.teacher)
    save_records(records_of(rollouts, found, config.teacher), file)
    gain = found[rollouts.greedy()] - min(found.values())
    return f"{instance.graph.name} gains {gain:.3f}"
