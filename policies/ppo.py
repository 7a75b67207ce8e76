"""MaskablePPO with rollouts that start afresh, and advantages relative to the instance.

Every update begins with environments reset from a seed made of the run's seed and the number of
the update, so an update depends only on these and on the weights: a resumed run equals one that
was not interrupted. A minibatch holds few distinct instances, for each costs an encoding.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any

import numpy as np
import torch
from sb3_contrib import MaskablePPO
from sb3_contrib.common.maskable.buffers import (
    MaskableDictRolloutBuffer,
    MaskableDictRolloutBufferSamples,
)
from stable_baselines3.common.vec_env import VecEnv

from rlplace.policies.types import DoubleArray, distinct

#: Below this spread (standard deviation of advantages) an instance teaches nothing.
_NO_SPREAD = 1e-6


class GroupedBuffer(MaskableDictRolloutBuffer):
    """Experience whose advantages are centred and scaled within each instance.

    Instances differ far more in what can be gained than plans of one instance do; relative to
    their group (as in GRPO, Shao et al. 2024, https://arxiv.org/abs/2402.03300) all of them
    weigh alike. Where an instance's advantages have no spread, they are zero.

    Args:
        args: Of `MaskableDictRolloutBuffer`.
        graphs_per_batch: Distinct instances in a minibatch.
        kwargs: Of `MaskableDictRolloutBuffer`.
    """

    def __init__(self, *args: Any, graphs_per_batch: int = 8, **kwargs: Any) -> None:
        self.graphs_per_batch = graphs_per_batch
        super().__init__(*args, **kwargs)

    def compute_returns_and_advantage(
        self, last_values: torch.Tensor, dones: np.ndarray[Any, Any]
    ) -> None:
        """Generalised advantages, then relative to the instance."""
        super().compute_returns_and_advantage(last_values, dones)
        ids = self.observations["instance"].reshape(self.advantages.shape)
        self.advantages = relative(self.advantages, ids).astype(np.float32)

    def get(  # type: ignore[override]
        self, batch_size: int | None = None
    ) -> Generator[MaskableDictRolloutBufferSamples, None, None]:
        """Minibatches of few instances each, in random order (of numpy's global generator)."""
        assert self.full, "the buffer is read when it is full"
        if not self.generator_ready:
            for key, values in self.observations.items():
                self.observations[key] = self.swap_and_flatten(values)
            for key in ("actions", "values", "log_probs", "advantages", "returns", "action_masks"):
                setattr(self, key, self.swap_and_flatten(getattr(self, key)))
            self.generator_ready = True
        ids = self.observations["instance"].reshape(-1)
        size = len(ids) if batch_size is None else batch_size
        shuffled = np.random.permutation(distinct(ids)[0])
        for first in range(0, len(shuffled), self.graphs_per_batch):
            chosen = shuffled[first : first + self.graphs_per_batch]
            inside = np.random.permutation(np.flatnonzero(np.isin(ids, chosen)))
            for start in range(0, len(inside), size):
                yield self._get_samples(inside[start : start + size])


def relative(advantages: DoubleArray, ids: np.ndarray[Any, Any]) -> DoubleArray:
    """Advantages, of any shape, centred and scaled over equal `ids`; 0 where there is no spread."""
    _, group = distinct(ids)
    flat = advantages.reshape(-1).astype(np.float64)
    sizes = np.bincount(group)
    centred = flat - (np.bincount(group, flat) / sizes)[group]
    spread = np.sqrt(np.bincount(group, centred**2) / sizes)[group]
    scaled = np.where(spread > _NO_SPREAD, centred / np.maximum(spread, _NO_SPREAD), 0.0)
    return scaled.reshape(advantages.shape)


class PlacePPO(MaskablePPO):
    """MaskablePPO whose every update starts from seeds; see the module's docstring.

    Args:
        args: Of `MaskablePPO`.
        update: Updates that were done before.
        kwargs: Of `MaskablePPO`; `seed` is required.
    """

    def __init__(self, *args: Any, update: int = 0, **kwargs: Any) -> None:
        self.update = update
        #: Called with a seed before each rollout; may choose what it is about.
        self.before_rollout: Callable[[int], None] | None = None
        #: Called with the number of updates done, after each.
        self.after_update: Callable[[int], None] | None = None
        super().__init__(*args, **kwargs)

    def collect_rollouts(self, env: VecEnv, *args: Any, **kwargs: Any) -> bool:
        """As MaskablePPO, from freshly seeded environments."""
        assert self.seed is not None, "PlacePPO needs a seed"
        seed = int(np.random.SeedSequence((self.seed, self.update)).generate_state(1)[0] >> 1)
        torch.manual_seed(seed)
        np.random.seed(seed)
        if self.before_rollout is not None:
            self.before_rollout(seed)
        env.seed(seed)
        self._last_obs = env.reset()  # type: ignore[assignment]
        self._last_episode_starts = np.ones((env.num_envs,), dtype=bool)
        return super().collect_rollouts(env, *args, **kwargs)

    def train(self) -> None:
        """As MaskablePPO; tells `after_update`."""
        super().train()
        self.update += 1
        if self.after_update is not None:
            self.after_update(self.update)
