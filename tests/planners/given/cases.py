"""Random problems of the event simulators."""

from __future__ import annotations

from typing import Any

import numpy as np

from rlplace.graph.formats.doppler import read_doppler
from rlplace.graph.formats.giph import read_giph
from rlplace.graph.formats.types import GivenInstance


def random_edges(rng: np.random.Generator, ops: int, density: float = 0.15) -> list[list[int]]:
    """Pairs (source, target) of a random DAG."""
    pairs = [(a, b) for b in range(ops) for a in range(b)]
    return [[a, b] for a, b in pairs if rng.random() < density]


def random_doppler(rng: np.random.Generator, ops: int, devices: int) -> GivenInstance:
    """Small whole costs: equal times are everywhere."""
    data = {
        "comp": [1e10 * int(cost) for cost in rng.integers(0, 4, ops)],
        "comm": [1e10 * int(cost) for cost in rng.integers(0, 3, ops)],
        "edges": random_edges(rng, ops),
        "default_devices": devices,
    }
    return read_doppler(data, "random")


def random_giph(rng: np.random.Generator, ops: int, devices: int) -> GivenInstance:
    """Any costs, devices of different speed, of which each runs some of three op types."""
    apart = 1 - np.eye(devices)
    kinds: dict[str, Any] = {
        str(d): sorted({d % 3, *rng.choice(3, 1 + d % 2, replace=False).tolist()})
        for d in range(devices)
    }
    kinds["0"] = [0, 1, 2]
    network = {
        "comp_rate": rng.uniform(0.5, 2.0, devices).tolist(),
        "comm_delay": (rng.uniform(0.0, 2.0, (devices, devices)) * apart).tolist(),
        "comm_rate": (rng.uniform(0.0, 0.5, (devices, devices)) * apart).tolist(),
        "device_constraints": kinds,
    }
    program = {
        "compute": rng.uniform(1.0, 5.0, ops).tolist(),
        "type": rng.integers(0, 3, ops).tolist(),
        "edges": [[a, b, float(rng.uniform(0.0, 8.0))] for a, b in random_edges(rng, ops)],
    }
    return read_giph({"networks": [network], "programs": [program]}, "0/0")
