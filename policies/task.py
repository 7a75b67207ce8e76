"""What is learned: placement with the stage-wise builder, behind a small interface.

`rlplace.policies.train` knows nothing of placement; another decision process is another `Task`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from functools import cached_property
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Protocol

import gymnasium
import numpy as np

from rlplace.envs.builders.stagewise import StagewiseBuilder
from rlplace.envs.instances import InstanceGenerator
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
            f"Trained on {config.instances} random instances (at most {config.max_devices} "
            f"devices and {config.max_groups} groups, {config.mixed_share:.0%} of the clusters "
            f"mixed): imitation of the best of {config.teacher.evaluations} plans an instance, "
            f"searched among the stage-wise builder's decisions, then {config.ppo.updates} updates "
            "of MaskablePPO on the predicted step time."
        )

    def instance(self, stream: int, index: int) -> Instance:
        """A random instance of a stream."""
        return self.generator(np.random.default_rng([self.config.seed, stream, index]))

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
