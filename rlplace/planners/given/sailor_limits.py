"""Lower limits of Sailor's rule that need no search."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product

import numpy as np

from rlplace.cost.given.sailor import (
    BUCKET,
    FLOAT,
    Replica,
    gradient_bytes,
    transfer_seconds,
)
from rlplace.cost.given.sailor_form import SailorInstance


@dataclass(frozen=True)
class Limits:
    """Lower limits of parts of a step.

    Args:
        slowest: Of the slowest stage.
        reduction: Of the slowest gradient reduction.
        rest: Of all but what the slowest stage is waited for.
        step: Of the step.
        ceiling: Upper limit of a stage.
    """

    slowest: float
    reduction: float
    rest: float
    step: float
    ceiling: float


@dataclass(frozen=True)
class _Least:
    """Least seconds of all layers and of a hop, and their least prices, see `limits`."""

    work: float
    hop: float
    price: float
    hop_price: float


def limits(
    instance: SailorInstance,
    offered: tuple[Replica, ...],
    micro_batch: int,
    replicas: int,
    mixes: bool,
) -> Limits:
    """Limits of all plans with a micro-batch and a number of replicas.

    For each number of stages, and the least of all. Devices are priced so that the cluster costs
    one: what all stages of all replicas do, each layer and hop where it is cheapest, then costs no
    more than the slowest stage takes (linear programming duality). Nor is the slowest stage below
    the mean of the stages, or the slowest reduction below the mean of the reductions.

    Args:
        instance: The problem.
        offered: What a replica may be.
        micro_batch: Samples.
        replicas: Replicas of every stage.
        mixes: Whether a stage may have replicas of several kinds; where none may, the devices
            beyond a multiple of the replicas are idle.
    """
    counts = {
        kind: count if mixes else count - count % replicas
        for kind, count in instance.counts.items()
    }
    offered = tuple((kind, tp) for kind, tp in offered if counts[kind] >= tp)
    if sum(counts.values()) < replicas or not offered:
        return Limits(math.inf, math.inf, math.inf, math.inf, math.inf)
    least = _least(instance, counts, offered, micro_batch)
    reductions = _reductions(instance, replicas)
    update = min(instance.model.updates[kind, micro_batch, tp] for kind, tp in offered)
    weight = -(-instance.batch // (micro_batch * replicas)) - 1
    found = []
    for stages in range(1, len(instance.model.outputs) + 1):
        hops = 0 if stages == 1 else 2 * stages - (stages <= 3)
        filling = least.work + hops * least.hop
        priced = replicas * (least.price + hops * least.hop_price)
        slowest = max(priced, filling / stages)
        rest = max(filling, slowest) + reductions / stages + update
        found.append((slowest, reductions / stages, rest, weight * slowest + rest))
    longest = max(instance.model.outputs) * FLOAT * micro_batch
    hop = max(transfer_seconds(instance, a, b, longest) for a, b in product(offered, repeat=2))
    work = max(sum(instance.model.times[kind, micro_batch, tp]) for kind, tp in offered)
    slowest, reduction, rest, step = np.array(found).min(axis=0).tolist()
    return Limits(slowest, reduction, rest, step, ceiling=work + 2 * hop)


def _least(
    instance: SailorInstance,
    counts: Mapping[str, int],
    offered: tuple[Replica, ...],
    micro_batch: int,
) -> _Least:
    times = {(k, tp): np.array(instance.model.times[k, micro_batch, tp]) for k, tp in offered}
    each = {
        kind: min(tp * float(of.sum()) for (k, tp), of in times.items() if k == kind)
        for kind in {kind for kind, _ in offered}
    }
    rate = sum(counts[kind] / seconds for kind, seconds in each.items())
    price = {(kind, tp): tp / (each[kind] * rate) for kind, tp in offered}
    size = min(instance.model.outputs) * FLOAT * micro_batch
    hop = {a: min(transfer_seconds(instance, a, b, size) for b in offered) for a in offered}
    return _Least(
        work=float(np.min(list(times.values()), axis=0).sum()),
        hop=min(hop.values()),
        price=float(np.min([price[of] * times[of] for of in offered], axis=0).sum()),
        hop_price=min(price[of] * hop[of] for of in offered),
    )


def _reductions(instance: SailorInstance, replicas: int) -> float:
    """Least seconds of the reductions of all stages together, at the widest band of any message.

    Messages of less than a 64,000th of a bucket's are not looked at: a parabola may rise there.
    """
    size = gradient_bytes(instance, 0, len(instance.model.outputs), max(instance.model.params))
    sizes = BUCKET / replicas * np.logspace(-16.0, 0.0, 64, base=2.0)
    fits = [instance.fits[a, 1, b, 1] for a, b in product(instance.counts, repeat=2)]
    band = max(float(of) / fit.seconds(float(of)) for of in sizes for fit in fits)
    return 2 * (replicas - 1) * size / replicas / band
