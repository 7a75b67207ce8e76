"""How a policy is trained, as typed data; read from YAML."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, get_type_hints

import yaml
from pydantic import TypeAdapter, ValidationError

from rlplace.errors import InputError, nearest_names
from rlplace.policies.teacher import TeacherConfig
from rlplace.policies.types import ImitationConfig, NetConfig


@dataclass(frozen=True)
class PPOConfig:
    """MaskablePPO (Schulman et al. 2017, https://arxiv.org/abs/1707.06347), kept cautious.

    Args:
        updates: Updates of the policy.
        environments: Environments that collect side by side.
        steps: Decisions of each environment in a rollout.
        instances: Distinct instances in a rollout; each then has several episodes.
        epochs: Passes over a rollout.
        batch: States in a minibatch, at most.
        graphs_per_batch: Distinct instances in a minibatch.
        learning_rate: Of Adam.
        clip: Clip range of the probability ratio.
        target_kl: A pass ends when the policy has moved this far.
        gae_lambda: 1 is the plain return.
        entropy: Weight of the entropy bonus.
        value: Weight of the critic's loss.
        judge_every: Updates between judgements on held-out instances.
    """

    updates: int = 60
    environments: int = 8
    steps: int = 128
    instances: int = 16
    epochs: int = 3
    batch: int = 256
    graphs_per_batch: int = 8
    learning_rate: float = 1e-4
    clip: float = 0.1
    target_kl: float = 0.02
    gae_lambda: float = 1.0
    entropy: float = 1e-3
    value: float = 0.5
    judge_every: int = 10


@dataclass(frozen=True)
class TrainConfig:
    """A training run.

    Args:
        name: Of the run and of its policy.
        folder: Where everything that it makes lies; a run in it goes on.
        seed: Of everything random.
        instances: Random instances that are searched and imitated.
        pool: Random instances that PPO draws from; the builder keeps the tables of 48.
        judged: Held-out instances on which networks are judged during training.
        min_devices: Smallest cluster; on very small ones the heuristic leaves nothing to learn.
        max_devices: Largest cluster.
        max_groups: Largest graph.
        mixed_share: Share of clusters with several kinds of devices.
        workers: Processes that search.
        threads: Threads of torch.
        save_every: Epochs or updates between checkpoints.
        track: Whether Weights & Biases follows; offline unless a key is set.
        quiet: No progress bars.
        network: Its shape.
        teacher: How plans are searched.
        imitation: How they are imitated.
        ppo: What follows.
    """

    name: str = "small"
    folder: str = "runs/small"
    seed: int = 0
    instances: int = 300
    pool: int = 48
    judged: int = 20
    min_devices: int = 8
    max_devices: int = 32
    max_groups: int = 64
    mixed_share: float = 0.5
    workers: int = 1
    threads: int = 1
    save_every: int = 5
    track: bool = False
    quiet: bool = False
    network: NetConfig = field(default_factory=NetConfig)
    teacher: TeacherConfig = field(default_factory=TeacherConfig)
    imitation: ImitationConfig = field(default_factory=ImitationConfig)
    ppo: PPOConfig = field(default_factory=PPOConfig)

    @staticmethod
    def load(path: str | Path) -> TrainConfig:
        """A config from a YAML file; what it does not name keeps its default.

        Raises:
            InputError: On an unknown field or a value of a wrong type.
        """
        try:
            content = yaml.safe_load(Path(path).read_text()) or {}
        except (OSError, yaml.YAMLError) as error:
            raise InputError("config", str(path), f"must be a YAML file ({error})") from error
        _check_names(TrainConfig, content, str(path))
        try:
            return TypeAdapter(TrainConfig).validate_python(content)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"]))
            raise InputError(where, first["input"], first["msg"].lower()) from error


def _check_names(kind: Any, content: Any, where: str) -> None:
    if not isinstance(content, Mapping):
        raise InputError(where, content, "must be a mapping from names to values")
    known = {item.name for item in fields(kind)}
    for name in content:
        if name not in known:
            rule = f"{where} has no such field"
            raise InputError(str(name), content[name], rule, nearest_names(str(name), known))
    for name, hint in get_type_hints(kind).items():
        if is_dataclass(hint) and name in content:
            _check_names(hint, content[name], name)
