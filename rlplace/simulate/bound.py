"""Provable lower limits of the step time of an instance, under the analytic cost model."""

from __future__ import annotations

import numpy as np

from rlplace.cluster.types import DeviceKind
from rlplace.cost.compute import matmul_seconds
from rlplace.graph.types import Affine, Structure, Work
from rlplace.plan.types import Instance


def bound(instance: Instance) -> float:
    """The larger of two limits (seconds) that no plan can beat.

    *Work over speed.* Group g on core c takes at least ``w_gc * x_gc`` seconds, where x_gc is the
    share of the group's work done there and w_gc the seconds for all of it at the kind's best
    efficiency. For any weights v_c, T * sum(v) >= sum_c v_c sum_g w_gc x_gc >=
    sum_g min_c v_c w_gc; v_c = 1 / sum_g w_gc is used, which is exact on equal devices.

    *Critical path.* One sample passes all groups forward and backward, one after another, each at
    its best tp degree and kind.
    """
    return max(_work_bound(instance), _path_bound(instance))


def _work_bound(instance: Instance) -> float:
    cluster = instance.cluster
    cores = {
        (d.node, d.core) if d.core is not None else (-1, d.index): d.kind for d in cluster.devices
    }
    names = sorted({*cores.values()})
    kinds = {kind.name: kind for kind in cluster.kinds}
    count = np.array([sum(kind == name for kind in cores.values()) for name in names])
    seconds = np.array(
        [
            [_whole_seconds(instance, structure, kinds[name]) for name in names]
            for structure in instance.graph.structures
        ]
    )
    repeats = np.bincount(
        [group.structure for group in instance.graph.groups],
        minlength=len(instance.graph.structures),
    )
    weight = 1.0 / np.maximum(repeats @ seconds, 1e-30)
    return float(repeats @ (seconds * weight).min(axis=1) / (count @ weight))


def _whole_seconds(instance: Instance, structure: Structure, kind: DeviceKind) -> float:
    """Seconds of a group's whole work on one device at best efficiency.

    Over the layouts, the least of degree times local work: a sharded program may do less.
    """
    return min(
        degree * _best_seconds(instance, work, kind, float(instance.global_batch))
        for degree, work in _works(structure)
    )


def _best_seconds(instance: Instance, work: Work, kind: DeviceKind, samples: float) -> float:
    peak = kind.peak_flops[instance.bytes.compute] * kind.max_efficiency
    bandwidth = kind.bandwidth * kind.memory_efficiency / instance.bytes.activation
    flops = work.flops(samples) + work.backward_flops(samples)
    _, forward_moved, backward_moved = instance.traffic(work)
    return flops / peak + (forward_moved(samples) + backward_moved(samples)) / bandwidth


def _path_bound(instance: Instance) -> float:
    total = 0.0
    for structure, repeats in _counted(instance):
        total += repeats * min(
            _one_sample_seconds(instance, work, kind)
            for _, work in _works(structure)
            for kind in instance.cluster.kinds
        )
    return total


def _one_sample_seconds(instance: Instance, work: Work, kind: DeviceKind) -> float:
    """Forward and backward of one sample, as `AnalyticCost` costs compute."""
    dtype, size = instance.bytes.compute, instance.bytes.activation
    bandwidth = kind.bandwidth * kind.memory_efficiency / size
    kernels, forward_moved, backward_moved = instance.traffic(work)
    pairs: tuple[tuple[Affine, Affine, int], ...] = (
        (work.flops, forward_moved, 1),
        (work.backward_flops, backward_moved, 2),
    )
    return sum(
        matmul_seconds(kind, dtype, flops(1.0), work.matmuls * launches)
        + moved(1.0) / bandwidth
        + kernels * launches * kind.launch_overhead
        for flops, moved, launches in pairs
    )


def _works(structure: Structure) -> list[tuple[int, Work]]:
    return [(1, structure.work), *((layout.degree, layout.work) for layout in structure.layouts)]


def _counted(instance: Instance) -> list[tuple[Structure, int]]:
    used = [group.structure for group in instance.graph.groups]
    return [(s, used.count(i)) for i, s in enumerate(instance.graph.structures)]
