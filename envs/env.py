"""The gymnasium environment ``rlplace/Place-v0``.

An episode asks for a plan of one instance. The observation is a Dict: ``instance`` (1,), the
number of the instance in the bank; ``step`` (1,), decisions so far; ``features`` (N, F),
``spans`` (N, 4) and ``mask`` (N,), the candidates as `rlplace.envs.types.Candidates` has them,
padded with zeros to N = MAX_CANDIDATES rows. An action is the index of a candidate. The reward is 0
until the plan is complete, then what the reward object says.

gymnasium's checkers step with any action of the space, so an action that the mask forbids does
not raise: the legal candidate with the best heuristic score is taken instead,
``info["illegal"]`` says so, and `ILLEGAL_COST` is taken off the reward of that step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import log
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from rlplace.envs.bank import InstanceBank
from rlplace.envs.builders.options import FEATURE_LIMIT
from rlplace.envs.builders.rollouts import best_index
from rlplace.envs.builders.stagewise import StagewiseBuilder, StagewiseState
from rlplace.envs.instances import InstanceGenerator, suite
from rlplace.envs.reward import PredictedReward, Reward
from rlplace.envs.types import CANDIDATE_FEATURES, MAX_CANDIDATES, BoolArray, Candidates
from rlplace.envs.viewer import render_outcome, render_text
from rlplace.errors import InputError
from rlplace.plan.types import Instance

#: What an action that the mask forbids costs.
ILLEGAL_COST = 0.1

Instances = Callable[[np.random.Generator], Instance] | Sequence[Instance] | str
Observation = dict[str, np.ndarray[Any, Any]]

_LARGEST = 2**31 - 1
_POOL = 16


class PlaceEnv(gymnasium.Env[Observation, np.int64]):
    """Place one instance, decision by decision.

    Args:
        instances: Where instances come from: a function of a generator of random numbers, a
            sequence to draw from, or the name of a suite. By default 16 small random ones.
        builder: The decision process.
        reward: Scores the plan at the end; `PredictedReward` by default.
        bank: Where instances are registered; by default one of its own.
        seed: Seeds the episodes until `reset` gets a seed of its own.
        render_mode: ``ansi`` or None.
        permute: Whether symmetric devices change places in every episode.
    """

    metadata = {"render_modes": ["ansi"]}  # noqa: RUF012  (gymnasium's own declaration)

    def __init__(
        self,
        instances: Instances | None = None,
        builder: StagewiseBuilder | None = None,
        reward: Reward | None = None,
        bank: InstanceBank | None = None,
        seed: int = 0,
        render_mode: str | None = None,
        permute: bool = True,
    ) -> None:
        if render_mode not in (None, "ansi"):
            raise InputError("render_mode", render_mode, "must be 'ansi' or None", "ansi")
        self.builder = builder or StagewiseBuilder()
        self.reward = reward or PredictedReward()
        self.bank = bank if bank is not None else InstanceBank()
        self.render_mode = render_mode
        self.permute = permute
        self._draw = _source(instances)
        self._first_seed: int | None = seed
        self._state: StagewiseState | None = None
        self._candidates: Candidates | None = None
        self._number = self._step = 0
        self._last = ""
        rows, shape = MAX_CANDIDATES, (MAX_CANDIDATES, CANDIDATE_FEATURES)
        self.action_space = spaces.Discrete(rows)
        self.observation_space: spaces.Space[Any] = spaces.Dict(
            {
                "instance": spaces.Box(0, _LARGEST, (1,), np.int64),
                "step": spaces.Box(0, _LARGEST, (1,), np.int64),
                "features": spaces.Box(-FEATURE_LIMIT, FEATURE_LIMIT, shape, np.float32),
                "spans": spaces.Box(0, _LARGEST, (rows, 4), np.int64),
                "mask": spaces.Box(0, 1, (rows,), np.int8),
            }
        )

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """A new episode; ``options={"instance": instance}`` asks for one instance."""
        super().reset(seed=self._first_seed if seed is None else seed)
        self._first_seed = None
        instance = (options or {}).get("instance") or self._draw(self.np_random)
        state = self.builder.start(instance, self.np_random if self.permute else None)
        self._number = self.bank.add(instance, self.builder.view(state))
        self._state, self._step, self._last = state, 0, ""
        self._candidates = self.builder.candidates(state)
        return self._observe(), {}

    def step(self, action: np.int64 | int) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """Choose a candidate.

        Raises:
            RuntimeError: Before the first `reset` or after the end of the episode.
        """
        if self._state is None or self._candidates is None:
            raise RuntimeError("the episode has not begun or is over: call reset() first")
        index, mask = int(action), self._candidates.mask
        illegal = not (0 <= index < len(mask) and mask[index])
        if illegal:
            index = best_index(self._candidates)
        self._state = self.builder.apply(self._state, index)
        self._step += 1
        info: dict[str, Any] = {"illegal": True} if illegal else {}
        reward = -ILLEGAL_COST if illegal else 0.0
        done = self.builder.done(self._state)
        self._candidates = None if done else self.builder.candidates(self._state)
        if done:
            reward += self._finish(info)
        return self._observe(), reward, done, False, info

    def action_masks(self) -> BoolArray:
        """Which actions are legal, as sb3-contrib asks; all False after the end."""
        mask = np.zeros(MAX_CANDIDATES, np.bool_)
        if self._candidates is not None:
            mask[: len(self._candidates.mask)] = self._candidates.mask
        return mask

    def render(self) -> str | None:
        """The state as text, in the mode ``ansi``."""
        if self.render_mode != "ansi" or self._state is None:
            return None
        return render_text(self._state, self._candidates) + self._last

    def _finish(self, info: dict[str, Any]) -> float:
        """Score the plan; fills `info` with plan, estimate, gap (over the bound) and times."""
        assert self._state is not None
        plan = self.builder.plan(self._state)
        outcome = self.reward(self._state.instance, plan)
        self._last = render_outcome(outcome.step_time, outcome.baseline)
        info |= {
            "plan": plan,
            "estimate": outcome.estimate,
            "gap": outcome.estimate.step_time / self._state.desk.bound - 1.0,
            "step_time": outcome.step_time,
            "baseline": outcome.baseline,
            "log_ratio": log(outcome.baseline / outcome.step_time),
        }
        return outcome.reward

    def _observe(self) -> Observation:
        features = np.zeros((MAX_CANDIDATES, CANDIDATE_FEATURES), np.float32)
        spans = np.zeros((MAX_CANDIDATES, 4), np.int64)
        if self._candidates is not None:
            rows = len(self._candidates.mask)
            features[:rows], spans[:rows] = self._candidates.features, self._candidates.spans
        return {
            "instance": np.array([self._number], np.int64),
            "step": np.array([self._step], np.int64),
            "features": features,
            "spans": spans,
            "mask": self.action_masks().astype(np.int8),
        }


def _source(instances: Instances | None) -> Callable[[np.random.Generator], Instance]:
    """A function that draws instances.

    Raises:
        InputError: If a sequence is empty.
    """
    if callable(instances):
        return instances
    if instances is None:
        generator = InstanceGenerator(max_devices=4, max_groups=16, cpu_share=0.2)
        return _pool(lambda index: generator(np.random.default_rng([0x9A7E, index])), _POOL)
    drawn = suite(instances) if isinstance(instances, str) else tuple(instances)
    if not drawn:
        raise InputError("instances", (), "at least one instance is needed")
    return _pool(drawn.__getitem__, len(drawn))


def _pool(make: Callable[[int], Instance], size: int) -> Callable[[np.random.Generator], Instance]:
    """Draws evenly from instances that are made when they are first drawn."""
    made: dict[int, Instance] = {}

    def draw(rng: np.random.Generator) -> Instance:
        index = int(rng.integers(size))
        if index not in made:
            made[index] = make(index)
        return made[index]

    return draw
