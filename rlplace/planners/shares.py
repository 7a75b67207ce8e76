"""How many samples of a micro-batch each replica of a stage has, where devices are of many kinds.

Poplar (Zhang et al., arXiv 2408.12596) measures of each device how long it takes over so many
samples, and how many it has room for. The least time in which all of them together can take a
micro-batch is then found by bisection, and each device has what it can do in it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rlplace.plan.types import Instance, Mesh, Stage
from rlplace.planners.costing import Costing

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Curve:
    """What a replica takes over 0, 1, 2, ... samples of a micro-batch.

    Args:
        seconds: Forward and backward, never less for more samples; 0 for none.
        room: The most samples that fit into its memory.
    """

    seconds: Floats
    room: int

    def within(self, seconds: float) -> int:
        """The most samples that it can do in a time."""
        return min(self.room, int(np.searchsorted(self.seconds, seconds, side="right")) - 1)


def curve(
    costing: Costing, stage: Stage, device: int, most: int, roomy: bool = False, held: int = 1
) -> Curve:
    """The curve of a replica of a stage on devices of one kind, up to `most` samples.

    It is measured at powers of two and drawn straight between them; a spline, as in the paper,
    might fall.

    Args:
        costing: Of the instance.
        stage: The stage; whatever shares it has are of no matter.
        device: The replica's first device.
        most: Samples.
        roomy: Whether memory is no limit.
        held: Micro-batches in flight.
    """
    sizes = sorted({*(2**power for power in range(most.bit_length())), most})
    seconds, size = np.array([_measure(costing, stage, device, n, held) for n in sizes]).T
    every = np.arange(1, most + 1)
    taken = np.interp(every, sizes, np.maximum.accumulate(seconds))
    limit = costing.solver.limit(Mesh((device,)))
    fits = int(np.count_nonzero(np.interp(every, sizes, size) <= limit))
    return Curve(np.concatenate([[0.0], taken]), most if roomy else fits)


def _measure(
    costing: Costing, stage: Stage, device: int, samples: int, held: int
) -> tuple[float, float]:
    """Seconds of a micro-batch and bytes, with so many of them in flight."""
    shares = (samples,) * stage.mesh.dp
    own = Stage(stage.start, stage.stop, stage.mesh, stage.choices, shares)
    found = costing.estimator.replica(own, 1, 0, device)
    static = found.params + found.gradients + found.optimizer_states
    return found.forward + found.backward, static + held * found.saved + found.transient


def even_time(curves: Sequence[Curve], samples: int) -> tuple[int, ...] | None:
    """Samples of each replica, so that the slowest is as quick as can be; None without room.

    Args:
        curves: Of each replica; those of equal ones are one object.
        samples: Of a micro-batch.
    """
    numbers = Counter(id(own) for own in curves)
    kinds = {id(own): own for own in curves}
    if sum(number * kinds[key].room for key, number in numbers.items()) < samples:
        return None

    def together(seconds: float) -> int:
        return sum(number * kinds[key].within(seconds) for key, number in numbers.items())

    times = np.unique(np.concatenate([own.seconds for own in kinds.values()]))
    low, high = 0, len(times) - 1
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if together(times[middle]) >= samples else (middle + 1, high)
    shares = [own.within(times[low]) for own in curves]
    # Whoever ends last has one sample less, as long as there are too many.
    for _ in range(sum(shares) - samples):
        last = max(range(len(shares)), key=lambda i: (curves[i].seconds[shares[i]], i))
        shares[last] -= 1
    return tuple(shares)


def curves_of(
    costing: Costing, stage: Stage, most: int, roomy: bool = False, held: int = 1
) -> list[Curve]:
    """The curve of each replica of a stage; those on devices of one kind share one."""
    found: dict[str, Curve] = {}
    kinds = replica_kinds(costing.instance, stage.mesh)
    for kind, device in zip(kinds, stage.mesh.firsts, strict=True):
        if kind not in found:
            found[kind] = curve(costing, stage, device, most, roomy, held)
    return [found[kind] for kind in kinds]


def replica_kinds(instance: Instance, mesh: Mesh) -> list[str]:
    """The device kind of each replica."""
    devices = instance.cluster.devices
    return [devices[device].kind for device in mesh.firsts]


def gain(curves: Sequence[Curve], shares: Sequence[int]) -> float:
    """The time of replicas with some shares, over that with equal ones, whole or not."""
    taken = max(own.seconds[share] for own, share in zip(curves, shares, strict=True))
    equal = sum(shares) / len(shares)
    even = max(np.interp(equal, np.arange(len(own.seconds)), own.seconds) for own in curves)
    return float(taken / even)
