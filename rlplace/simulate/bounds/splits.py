"""Every way to split a global batch over replicas and micro-batches and to shard states."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Splits:
    """The splits by ascending micro-batch count (P,).

    Args:
        sizes: The distinct samples of a micro-batch on a replica (S,), ascending.
        size: Index into `sizes`.
        replicas: Replicas that see different samples.
        shards: Of them, those over which ZeRO shards.
        zero: The ZeRO level, 0 where there is one shard.
        count: Micro-batches.
        first: Where each distinct count begins (M,).
    """

    sizes: Floats
    size: Ints
    replicas: Ints
    shards: Ints
    zero: Ints
    count: Ints
    first: Ints

    def least(self, values: Floats) -> Floats:
        """The least of all but the last axis, for each micro-batch count (M,)."""
        flat = values.reshape(-1, values.shape[-1]).min(axis=0)
        return np.minimum.reduceat(flat, self.first)


def splits(batch: int, devices: int, levels: tuple[int, ...]) -> Splits:
    """All splits of `batch` samples over at most `devices` replicas, with the ZeRO levels offered.

    Samples of a micro-batch on a replica, times replicas, times micro-batches are the batch; the
    shards divide the replicas.
    """
    found = sorted(
        (batch // (size * replicas), size, replicas, shards, level)
        for size in _divisors(batch)
        for replicas in _divisors(batch // size)
        if replicas <= devices
        for shards in _divisors(replicas)
        for level in ((0,) if shards == 1 else sorted({*levels} - {0}))
    )
    count, samples, replicas, shards, zero = np.array(found, np.int64).T
    sizes, size = np.unique(samples, return_inverse=True)
    first = np.unique(count, return_index=True)[1]
    return Splits(sizes.astype(float), size, replicas, shards, zero, count, first)


def _divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]
