"""A toy process with the builder's contract: tasks, one after the other, onto hosts.

The heuristic looks at loads and not at speeds, so that there is something to learn.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from rlplace.envs.types import (
    CANDIDATE_FEATURES,
    DEVICE_FEATURES,
    EDGE_FEATURES,
    MAX_CANDIDATES,
    OP_FEATURES,
    Candidates,
    InstanceView,
)


@dataclass(frozen=True)
class ToyInstance:
    sizes: tuple[float, ...]
    speeds: tuple[float, ...]


@dataclass(frozen=True)
class ToyState:
    instance: ToyInstance
    loads: tuple[float, ...]
    counts: tuple[int, ...]
    step: int = 0


class ToyBuilder:
    """Chooses a host for each task; a host takes at most half of the tasks, rounded up."""

    def start(self, instance: ToyInstance, rng: np.random.Generator | None = None) -> ToyState:
        speeds = instance.speeds
        if rng is not None:
            speeds = tuple(rng.permutation(speeds).tolist())
        hosts = len(speeds)
        return ToyState(ToyInstance(instance.sizes, speeds), (0.0,) * hosts, (0,) * hosts)

    def view(self, state: ToyState) -> InstanceView:
        tasks, hosts = len(state.instance.sizes), len(state.instance.speeds)
        ops = np.zeros((tasks, OP_FEATURES), dtype=np.float32)
        ops[:, 0] = state.instance.sizes
        devices = np.zeros((hosts, DEVICE_FEATURES), dtype=np.float32)
        devices[:, 0] = state.instance.speeds
        chain = np.stack([np.arange(tasks - 1), np.arange(1, tasks)])
        pairs = np.array([(a, b) for a in range(hosts) for b in range(hosts) if a < b]).T
        return InstanceView(
            ops,
            chain,
            np.ones((tasks - 1, EDGE_FEATURES), dtype=np.float32),
            devices,
            pairs,
            np.ones((pairs.shape[1], EDGE_FEATURES), dtype=np.float32),
            np.full(8, tasks / 10.0, dtype=np.float32),
        )

    def candidates(self, state: ToyState) -> Candidates:
        task, hosts = state.step, len(state.instance.speeds)
        loads, speeds = np.array(state.loads), np.array(state.instance.speeds)
        size = state.instance.sizes[task]
        features = np.zeros((hosts, CANDIDATE_FEATURES), dtype=np.float32)
        features[:, 0] = -loads / sum(state.instance.sizes)
        features[:, 1] = speeds / speeds.max()
        features[:, 2] = (loads + size) / speeds
        spans = np.array([(task, task + 1, host, host + 1) for host in range(hosts)])
        limit = (len(state.instance.sizes) + 1) // 2
        return Candidates(features, spans, np.array(state.counts) < limit)

    def apply(self, state: ToyState, index: int) -> ToyState:
        loads, counts = list(state.loads), list(state.counts)
        loads[index] += state.instance.sizes[state.step]
        counts[index] += 1
        return replace(state, loads=tuple(loads), counts=tuple(counts), step=state.step + 1)

    def done(self, state: ToyState) -> bool:
        return state.step == len(state.instance.sizes)

    def plan(self, state: ToyState) -> tuple[float, ...]:
        return state.loads


def toy_instance(rng: np.random.Generator) -> ToyInstance:
    tasks, hosts = int(rng.integers(4, 9)), int(rng.integers(2, 5))
    sizes, speeds = rng.uniform(0.5, 1.5, tasks), np.exp(rng.uniform(-1.5, 0.0, hosts))
    return ToyInstance(tuple(sizes.tolist()), tuple(speeds.tolist()))


def toy_time(state: ToyState) -> float:
    return max(load / s for load, s in zip(state.loads, state.instance.speeds, strict=True))


def finishing_first(candidates: Candidates) -> int:
    """The teacher: the legal host on which the task ends first."""
    return int(np.where(candidates.mask, candidates.features[:, 2], np.inf).argmin())


def toy_rollout(instance: ToyInstance, choose: Callable[[Candidates], int]) -> ToyState:
    builder = ToyBuilder()
    state = builder.start(instance)
    while not builder.done(state):
        state = builder.apply(state, choose(builder.candidates(state)))
    return state


class ToyBank:
    def __init__(self, instances: list[ToyInstance]) -> None:
        builder = ToyBuilder()
        self._views = [builder.view(builder.start(instance)) for instance in instances]

    def view(self, instance: int) -> InstanceView:
        return self._views[instance]


class ToyEnv(gymnasium.Env[dict[str, Any], np.int64]):
    """Observations and reward as those of rlplace/Place-v0."""

    def __init__(self, instances: list[ToyInstance]) -> None:
        self._instances, self._builder = instances, ToyBuilder()
        self._bases = [
            toy_time(
                toy_rollout(instance, lambda c: int((c.features[:, 0] - 99.0 * ~c.mask).argmax()))
            )
            for instance in instances
        ]
        rows = MAX_CANDIDATES
        self.action_space = spaces.Discrete(rows)
        self.observation_space = spaces.Dict(
            {
                "instance": spaces.Box(0, 2**31 - 1, (1,), np.int64),
                "step": spaces.Box(0, 2**31 - 1, (1,), np.int64),
                "features": spaces.Box(-np.inf, np.inf, (rows, CANDIDATE_FEATURES), np.float32),
                "spans": spaces.Box(0, 2**31 - 1, (rows, 4), np.int64),
                "mask": spaces.Box(0, 1, (rows,), np.int8),
            }
        )

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        super().reset(seed=seed)
        self._number = int(self.np_random.integers(len(self._instances)))
        self._state = self._builder.start(self._instances[self._number])
        return self._observe(), {}

    def step(self, action: np.int64) -> tuple[dict[str, Any], float, bool, bool, dict[str, Any]]:
        self._state = self._builder.apply(self._state, int(action))
        done = self._builder.done(self._state)
        reward = float(np.log(self._bases[self._number] / toy_time(self._state))) if done else 0.0
        return self._observe(), reward, done, False, {}

    def action_masks(self) -> np.ndarray[Any, np.dtype[np.bool_]]:
        mask: np.ndarray[Any, np.dtype[np.bool_]] = self._observe()["mask"].astype(bool)
        return mask

    def _observe(self) -> dict[str, Any]:
        rows = MAX_CANDIDATES
        features = np.zeros((rows, CANDIDATE_FEATURES), dtype=np.float32)
        spans, mask = np.zeros((rows, 4), dtype=np.int64), np.zeros(rows, dtype=np.int8)
        if not self._builder.done(self._state):
            listed = self._builder.candidates(self._state)
            count = len(listed.mask)
            features[:count], spans[:count] = listed.features, listed.spans
            mask[:count] = listed.mask
        else:
            mask[0] = 1
        number, step = np.array([self._number]), np.array([self._state.step])
        return {
            "instance": number,
            "step": step,
            "features": features,
            "spans": spans,
            "mask": mask,
        }


@pytest.fixture(scope="session")
def toy() -> SimpleNamespace:
    """The toy process, with twelve instances of different sizes."""
    rng = np.random.default_rng(3)
    instances = [toy_instance(rng) for _ in range(12)]
    return SimpleNamespace(
        builder=ToyBuilder(),
        instances=instances,
        bank=ToyBank(instances),
        env=ToyEnv,
        time=toy_time,
        rollout=toy_rollout,
        teacher=finishing_first,
    )


@pytest.fixture(scope="session")
def toy_states(toy: SimpleNamespace) -> list[tuple[InstanceView, Candidates, int]]:
    """Views, candidates and steps of states in the middle of an episode."""
    found = []
    for instance in toy.instances:
        state = toy.builder.start(instance)
        for _ in range(3):
            state = toy.builder.apply(state, toy.teacher(toy.builder.candidates(state)))
        found.append((toy.builder.view(state), toy.builder.candidates(state), state.step))
    return found


@pytest.fixture(scope="session")
def trained_like() -> Any:
    """A network whose last layers are not zero, as after training."""
    import torch

    from rlplace.policies.network import PlaceNet
    from rlplace.policies.types import NetConfig

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        net = PlaceNet(NetConfig(width=32, rounds=2))
        torch.nn.init.normal_(net.scorer.last.weight)
        torch.nn.init.normal_(list(net.scorer.critic.parameters())[-2])
    return net.eval()
