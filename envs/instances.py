"""Where episodes come from: random instances and fixed suites."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from rlplace.cluster.types import Cluster
from rlplace.envs.builders.room import has_room
from rlplace.envs.clusters import (
    HELD_OUT_KINDS,
    TRAIN_KINDS,
    precision_for,
    random_cluster,
    random_cpu_cluster,
)
from rlplace.envs.families import HELD_OUT_FAMILIES, TRAIN_FAMILIES, Family
from rlplace.errors import InputError, nearest_names
from rlplace.graph.types import OpGraph
from rlplace.plan.types import OPTIMIZERS, PRECISIONS, Instance

SUITES = ("train", "held-out", "library")

#: Library models of the suites, with the arguments that they are captured with.
LIBRARY_MODELS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("gpt2-large", {}),
    ("llama-3-8b", {"seq_len": 4096}),
    ("bert-large", {}),
    ("t5-large", {}),
    ("vit-huge", {}),
    ("resnet-50", {}),
    ("mixtral-8x7b", {"seq_len": 2048}),
    ("llama-3-70b", {"seq_len": 4096}),
)
_HELD_OUT_SALT = 0x5EED


@dataclass(frozen=True)
class InstanceGenerator:
    """A stream of random instances; the distribution is data, so that a config can state it.

    Args:
        families: Names of `TRAIN_FAMILIES` or `HELD_OUT_FAMILIES`.
        kinds: Device kinds of the catalogue.
        max_devices: Largest cluster.
        max_groups: Largest graph.
        mixed_share: Share of clusters with several islands.
        cpu_share: Share of clusters that are ranks on one machine's cores.
    """

    families: tuple[str, ...] = tuple(TRAIN_FAMILIES)
    kinds: tuple[str, ...] = TRAIN_KINDS
    max_devices: int = 64
    max_groups: int = 200
    mixed_share: float = 0.5
    cpu_share: float = 0.05

    def __post_init__(self) -> None:
        known = TRAIN_FAMILIES | HELD_OUT_FAMILIES
        for name in self.families:
            if name not in known:
                rule = f"must be one of {', '.join(known)}"
                raise InputError("families", name, rule, nearest_names(name, known))
        if self.max_devices < 2:
            raise InputError("max_devices", self.max_devices, "must be at least 2", 2)
        if self.max_groups < 4:
            raise InputError("max_groups", self.max_groups, "must be at least 4", 4)

    def __call__(self, rng: np.random.Generator) -> Instance:
        """The next instance; the leanest plan of at least one shape fits."""
        mixed = bool(rng.random() < self.mixed_share)
        cpu = not mixed and rng.random() < self.cpu_share
        return random_instance(rng, self, mixed=mixed, cpu=cpu)


def random_instance(
    rng: np.random.Generator,
    generator: InstanceGenerator | None = None,
    *,
    mixed: bool | None = None,
    cpu: bool = False,
    feasible: bool = True,
) -> Instance:
    """A random graph on a random cluster, half of them with memory to spare.

    Args:
        rng: Source of randomness; equal generators give equal instances.
        generator: The distribution, by default that of training.
        mixed: Whether the cluster has several islands; None: by the distribution's share.
        cpu: Whether the cluster is ranks on one machine's cores.
        feasible: Whether to draw again until the leanest plan fits (see `has_room`).
    """
    own = generator or InstanceGenerator()
    several = bool(rng.random() < own.mixed_share) if mixed is None else mixed
    while True:
        cluster = (
            random_cpu_cluster(rng)
            if cpu
            else random_cluster(rng, own.kinds, mixed=several, max_devices=own.max_devices)
        )
        instance = _on_cluster(rng, own, cluster)
        if len(instance.graph.groups) <= own.max_groups and (not feasible or has_room(instance)):
            return instance


def suite(name: str, count: int | None = None, seed: int = 0) -> tuple[Instance, ...]:
    """A fixed set of instances; the same name, count and seed always give the same.

    Args:
        name: ``train`` (the training distribution), ``held-out`` (library models, and graph
            families and device kinds that training never sees; a third of the clusters mixed)
            or ``library`` (library models only).
        count: Number of instances; 64, 30 and 16 by default.
        seed: Another seed, another set.

    Raises:
        InputError: On an unknown name or a count below 1.
    """
    if name not in SUITES:
        rule = f"must be one of {', '.join(SUITES)}"
        raise InputError("suite", name, rule, nearest_names(name, SUITES))
    number = {"train": 64, "held-out": 30, "library": 16}[name] if count is None else count
    if number < 1:
        raise InputError("count", number, "must be at least 1", 1)
    return tuple(_suite(name, number, seed))


def _suite(name: str, count: int, seed: int) -> Iterator[Instance]:
    if name == "train":
        generator = InstanceGenerator()
        for index in range(count):
            yield generator(np.random.default_rng([seed, index]))
        return
    held_out = InstanceGenerator(families=tuple(HELD_OUT_FAMILIES), kinds=HELD_OUT_KINDS)
    for index in range(count):
        rng = np.random.default_rng([_HELD_OUT_SALT, seed, index])
        # Every third instance is mixed, every block of three turns to the library once or more.
        mixed = index % 3 == 2
        if name == "library" or (index // 3 + index) % 5 < 2:
            yield library_instance(rng, index % len(LIBRARY_MODELS), mixed=mixed)
        else:
            yield random_instance(rng, held_out, mixed=mixed)


def library_instance(rng: np.random.Generator, model: int, *, mixed: bool) -> Instance:
    """A model of `LIBRARY_MODELS` on a random cluster on which it fits."""
    from rlplace.graph import library

    name, arguments = LIBRARY_MODELS[model]
    graph = library.build(name, **arguments)
    kinds = tuple(dict.fromkeys((*HELD_OUT_KINDS, *TRAIN_KINDS)))
    while True:
        cluster = random_cluster(rng, kinds, mixed=mixed)
        precision = precision_for(rng, cluster)
        batch = _batch(rng, cluster, limit=4096)
        instance = Instance(graph, cluster, batch, precision=precision)
        if has_room(instance):
            return instance


def _on_cluster(rng: np.random.Generator, own: InstanceGenerator, cluster: Cluster) -> Instance:
    """A graph whose states fill a drawn share of the cluster's memory."""
    precision = precision_for(rng, cluster)
    optimizer = "adamw" if rng.random() < 0.8 else str(rng.choice(tuple(OPTIMIZERS)))
    sizes = PRECISIONS[precision]
    moments, moment = OPTIMIZERS[optimizer]
    each = sizes.weight + sizes.gradient + sizes.master + moments * (moment or sizes.state)
    memory = sum(cluster.kind(device.index).memory for device in cluster.devices)
    tight = rng.random() < 0.5
    low, high = (0.1, 0.55) if tight else (0.002, 0.1)
    share = float(np.exp(rng.uniform(math.log(low), math.log(high))))
    least = 2e6 if cluster.name == "cpu" else 5e7
    most = 1e8 if cluster.name == "cpu" else 1e11
    params = float(np.clip(share * memory / each, least, most))
    graph = _graph(rng, own, params)
    batch = _batch(rng, cluster, limit=256 if cluster.name == "cpu" else 4096)
    margin = float(rng.choice((0.0, 0.05, 0.08, 0.1)))
    attention = "flash" if rng.random() < 0.75 else "math"
    return Instance(
        graph,
        cluster,
        batch,
        precision=precision,
        optimizer=optimizer,
        attention=attention,
        memory_margin=margin,
    )


def _graph(rng: np.random.Generator, own: InstanceGenerator, params: float) -> OpGraph:
    families: dict[str, Family] = TRAIN_FAMILIES | HELD_OUT_FAMILIES
    return families[str(rng.choice(own.families))](rng, params)


def _batch(rng: np.random.Generator, cluster: Cluster, limit: int) -> int:
    """A global batch from 8 to `limit`, with the odd factors of the cluster more often than not."""
    power = int(2 ** rng.integers(3, int(math.log2(limit)) + 1))
    devices = len(cluster.devices)
    odd = devices // (devices & -devices)
    if odd in (3, 5, 9) and rng.random() < 0.7:
        return int(min(power * odd, limit * odd))
    return power
