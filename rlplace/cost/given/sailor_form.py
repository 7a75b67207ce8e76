"""Sailor's planning problem: a model's measured tables, machines of several kinds, and plans.

Strati et al., "Sailor: Automating Distributed Training over Dynamic, Heterogeneous, and
Geo-distributed Clusters", SOSP 2025 (arXiv 2504.17096). A stage of its plans may have replicas of
several kinds and tensor-parallel degrees, which no `Plan` can say: so it is a form of its own.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from rlplace.cost.profiled.rows import read_rows
from rlplace.errors import InputError, nearest_names
from rlplace.units import GIB


@dataclass(frozen=True, slots=True)
class SailorFit:
    """Bandwidth of a message: ``c2 x**2 + c1 x + c0`` GB/s, x = log2(megabytes), wherever x is."""

    c2: float
    c1: float
    c0: float

    def seconds(self, size: float) -> float:
        """Seconds for `size` bytes; infinite where the parabola is below zero."""
        if size <= 0.0:
            return 0.0
        place = math.log2(size / 1e6)
        bandwidth = self.c2 * place**2 + self.c1 * place + self.c0
        return size / 1e9 / bandwidth if bandwidth > 0.0 else math.inf


@dataclass(frozen=True)
class SailorModel:
    """What was measured of a model; a tuple has an entry for each layer.

    Args:
        name: Name.
        times: Forward and backward seconds by (kind, micro-batch, tp).
        updates: Seconds of the optimizer step by the same.
        params: Parameters by tp.
        saved: Floats kept for the backward pass of a sample, by tp.
        outputs: Floats of a sample's output, at tp 1.
    """

    name: str
    times: Mapping[tuple[str, int, int], tuple[float, ...]]
    updates: Mapping[tuple[str, int, int], float]
    params: Mapping[int, tuple[float, ...]]
    saved: Mapping[int, tuple[float, ...]]
    outputs: tuple[float, ...]


@dataclass(frozen=True)
class SailorInstance:
    """What a planner is asked.

    Args:
        model: The model.
        nodes: Kind and number of devices of each node.
        batch: Samples of a step.
        fits: Bandwidths by (kind that sends, its devices of a node that do, kind that receives,
            likewise).
        memory: Bytes of a device of each kind.
    """

    model: SailorModel
    nodes: tuple[tuple[str, int], ...]
    batch: int
    fits: Mapping[tuple[str, int, str, int], SailorFit]
    memory: Mapping[str, float]

    @cached_property
    def counts(self) -> dict[str, int]:
        """Devices of each kind."""
        kinds = dict.fromkeys(kind for kind, _ in self.nodes)
        return {kind: sum(n for k, n in self.nodes if k == kind) for kind in kinds}

    @cached_property
    def node_sizes(self) -> dict[str, int]:
        """Devices of the largest node of each kind."""
        return {kind: max(n for k, n in self.nodes if k == kind) for kind in self.counts}


@dataclass(frozen=True, slots=True)
class SailorStage:
    """A stage: layers [start, stop), and the kind and tp degree of each replica, in order."""

    start: int
    stop: int
    replicas: tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class SailorPlan:
    """A plan: samples of a micro-batch of a replica, and the stages in order."""

    micro_batch: int
    stages: tuple[SailorStage, ...]


def read_sailor_instance(
    folder: str | Path,
    model: str,
    devices: Mapping[str, int],
    batch: int,
    zone: str = "us-central1-a",
) -> SailorInstance:
    """A problem from Sailor's published profiles.

    Args:
        folder: Where ``layer_times.csv``, ``layer_memory.csv``, ``network_fits.csv`` and
            ``setup.json`` are.
        model: Such as ``OPT-350``.
        devices: Devices of each kind, on nodes of the size that ``setup.json`` gives.
        batch: Samples of a step.
        zone: Where all nodes are.

    Raises:
        InputError: If a file is missing, or has no such model or kind.
    """
    source = Path(folder)
    setup = json.loads((source / "setup.json").read_text())
    gib = setup["gpu_memory_gib_used_by_simulator"]
    for kind in devices:
        if kind not in gib:
            raise InputError("kind", kind, "Sailor has no such device", nearest_names(kind, gib))
    sizes = {kind: int(setup["machines"][kind]["gpus_per_node"]) for kind in devices}
    return SailorInstance(
        model=_read_model(source, model),
        nodes=tuple(
            (kind, min(sizes[kind], count - first))
            for kind, count in devices.items()
            for first in range(0, count, sizes[kind])
        ),
        batch=batch,
        fits=_read_fits(source, zone, devices),
        memory={kind: float(gib[kind]) * GIB for kind in devices},
    )


def _read_model(source: Path, model: str) -> SailorModel:
    times: dict[tuple[str, int, int], dict[int, dict[str, str]]] = {}
    for row in read_rows(source / "layer_times.csv", {"model": model}):
        key = (row["gpu"], int(row["micro_batch"]), int(row["tp"]))
        times.setdefault(key, {})[int(row["layer"])] = row
    memory: dict[int, dict[int, dict[str, str]]] = {}
    for row in read_rows(source / "layer_memory.csv", {"model": model}):
        memory.setdefault(int(row["tp"]), {})[int(row["layer"])] = row
    return SailorModel(
        name=model,
        times={
            key: tuple(float(rows[at]["fwd_s"]) + float(rows[at]["bwd_s"]) for at in sorted(rows))
            for key, rows in times.items()
        },
        updates={key: float(rows[0]["update_s"]) for key, rows in times.items()},
        params={tp: _column(rows, "params_floats") for tp, rows in memory.items()},
        saved={tp: _column(rows, "act_mem_floats") for tp, rows in memory.items()},
        outputs=_column(memory[1], "act_output_floats"),
    )


def _column(rows: Mapping[int, Mapping[str, str]], name: str) -> tuple[float, ...]:
    return tuple(float(rows[layer][name]) for layer in sorted(rows))


def _read_fits(
    source: Path, zone: str, kinds: Sequence[str] | Mapping[str, int]
) -> dict[tuple[str, int, str, int], SailorFit]:
    return {
        (row["send_gpu"], int(row["send_gpus"]), row["recv_gpu"], int(row["recv_gpus"])): SailorFit(
            *(float(row[name]) for name in ("c2", "c1", "c0"))
        )
        for row in read_rows(source / "network_fits.csv")
        if row["send_zone"] == row["recv_zone"] == zone
        and {row["send_gpu"], row["recv_gpu"]} <= set(kinds)
    }
