"""From what CPU ranks measured to a cluster: fits, and nothing that runs or waits."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from statistics import fmean, median

import numpy as np
from scipy.optimize import nnls

from rlplace.cluster.types import (
    Cluster,
    CollectiveCurve,
    CollectiveKind,
    Device,
    DeviceKind,
    Link,
    Node,
)


@dataclass(frozen=True, slots=True)
class RankFigures:
    """What one rank measured while all the others were as busy as itself.

    Args:
        matmuls: (FLOPs, seconds of its core) of matmuls of several sizes.
        streams: (bytes read and written, seconds of its core) of memory-bound ops.
        convolutions: As `matmuls`, of convolutions.
        attention: As `matmuls`, of flash attention: the FLOPs that its kernels do.
        updates: As `streams`, of an optimizer.
        launch: Seconds of its core for an op on a tensor of a few elements.
        resident: Bytes of the process before it computed anything.
        collectives: (kind, ranks of the group, bytes of the whole tensor, seconds on the wall).
    """

    matmuls: tuple[tuple[float, float], ...]
    streams: tuple[tuple[float, float], ...]
    convolutions: tuple[tuple[float, float], ...]
    attention: tuple[tuple[float, float], ...]
    updates: tuple[tuple[float, float], ...]
    launch: float
    resident: int
    collectives: tuple[tuple[CollectiveKind, int, float, float], ...] = ()


def fit_line(sizes: Sequence[float], seconds: Sequence[float]) -> tuple[float, float]:
    """Intercept and slope of the line through measured times, neither of them negative.

    Least squares of the relative error, so that a microsecond counts as much at the smallest size
    as a millisecond at the largest.

    Args:
        sizes: Bytes or FLOPs, at least two different ones.
        seconds: Positive times.
    """
    x, t = np.asarray(sizes, dtype=float), np.asarray(seconds, dtype=float)
    scale = x.max()
    (intercept, slope), _ = nnls(np.stack([1.0 / t, x / scale / t], axis=1), np.ones_like(t))
    # A flat fit is noise: no transfer is free, so the largest size sets the price of a byte.
    return float(intercept), float(slope or t[x.argmax()]) / float(scale)


def cpu_cluster(figures: Sequence[RankFigures], cores: int, memory: int) -> Cluster:
    """This machine as a cluster of one node with a device for each rank.

    The kind ``cpu`` describes one core at full speed, whether or not ranks share it. Matmul
    seconds follow ``(flops + half_flops) / (peak * max_efficiency)``, a line, so the same fit
    serves them and the collectives.

    Args:
        figures: Of each rank.
        cores: Cores that the ranks were pinned to, rank modulo cores.
        memory: Bytes for all ranks together.
    """
    ranks = len(figures)
    curves = fit_curves(figures)
    kind = fit_kind(figures, memory // ranks)
    p2p = next((curve for curve in curves if curve.kind == "p2p"), None)
    link = Link(kind.bandwidth, kind.launch_overhead, "memory")
    if p2p is not None:
        link = Link(1.0 / p2p.seconds_per_byte, p2p.latency, "gloo")
    devices = tuple(Device(rank, kind.name, 0, rank % cores) for rank in range(ranks))
    return Cluster(devices, (Node(0, link),), (kind,), curves=curves, name=f"{ranks}xcpu")


def fit_kind(figures: Sequence[RankFigures], memory: int) -> DeviceKind:
    """One core at full speed (see `cpu_cluster`); `memory` is that of a rank."""
    flops, seconds = _over_ranks([figure.matmuls for figure in figures])
    intercept, slope = fit_line(flops, seconds)
    # No plan may beat the peak, so it is at least what was seen.
    peak = max(1.0 / slope, *(size / time for size, time in zip(flops, seconds, strict=True)))
    moved, streams = _over_ranks([figure.streams for figure in figures])
    updated, updates = _over_ranks([figure.updates for figure in figures])
    pairs = zip([*moved, *updated], [*streams, *updates], strict=True)
    bandwidth = max(size / time for size, time in pairs)
    attended, attention = _over_ranks([figure.attention for figure in figures])
    convolved, convolutions = _over_ranks([figure.convolutions for figure in figures])
    as_matmuls = sum(intercept + slope * size for size in convolved)
    return DeviceKind(
        name="cpu",
        memory=memory,
        peak_flops={"fp32": peak},
        bandwidth=bandwidth,
        launch_overhead=median(figure.launch for figure in figures),
        max_efficiency=1.0 / slope / peak,
        half_flops=max(intercept / slope, 1.0),
        memory_efficiency=sum(moved) / sum(streams) / bandwidth,
        overlap=0.0,
        reserve=int(median(figure.resident for figure in figures)),
        attention_efficiency=sum(attended) / sum(attention) / peak,
        conv_efficiency=as_matmuls / sum(convolutions),
        stream_efficiency=sum(updated) / sum(updates) / bandwidth,
    )


def fit_curves(figures: Sequence[RankFigures]) -> tuple[CollectiveCurve, ...]:
    """One curve for each collective and group size, of the mean over the ranks that took part."""
    found: dict[tuple[CollectiveKind, int], dict[float, list[float]]] = defaultdict(
        lambda: defaultdict(list)
    )
    for figure in figures:
        for kind, ranks, size, seconds in figure.collectives:
            found[kind, ranks][size].append(seconds)
    curves = []
    for (kind, ranks), times in found.items():
        sizes, means = list(times), [fmean(values) for values in times.values()]
        # A larger message is never cheaper; where it seems so, that is noise.
        points = tuple(zip(sizes, accumulate(means, max), strict=True))
        curves.append(CollectiveCurve(kind, ranks, *fit_line(sizes, means), points))
    return tuple(curves)


def _over_ranks(
    measured: Sequence[tuple[tuple[float, float], ...]],
) -> tuple[list[float], list[float]]:
    """Sizes, and the median over the ranks of the seconds of each."""
    sizes = [size for size, _ in measured[0]]
    return sizes, [median(time for _, time in points) for points in zip(*measured, strict=True)]
