"""Ranks of ops on the mean device and the mean link (Topcuoglu et al. 2002, section 4).

Groups are in topological order, so that one pass over them is enough.
"""

from __future__ import annotations

import numpy as np

from rlplace.cost.given.event_loop import EventArrays, Floats


def mean_times(arrays: EventArrays) -> Floats:
    """Time of each op, the mean over the devices that may run it (V,)."""
    legal = np.isfinite(arrays.times)
    summed = np.where(legal, arrays.times, 0.0).sum(axis=1)
    return np.asarray(summed / legal.sum(axis=1))


def mean_transfers(arrays: EventArrays) -> Floats:
    """Time of each edge, the mean over the pairs of two devices (E,); 0 on a single device."""
    pairs = max(1, arrays.devices * (arrays.devices - 1))
    return np.asarray((arrays.delays.sum() + arrays.sizes[0] * arrays.rates.sum()) / pairs)


def upward_rank(arrays: EventArrays) -> Floats:
    """The longest path from each op to an end, itself included (V,)."""
    rank, transfers = mean_times(arrays), mean_transfers(arrays)
    for op in reversed(range(arrays.ops)):
        out = slice(arrays.first[op], arrays.first[op + 1])
        after = transfers[out] + rank[arrays.readers[0][out]]
        rank[op] += after.max(initial=0.0)
    return rank


def downward_rank(arrays: EventArrays) -> Floats:
    """The longest path from a beginning to each op, itself left out (V,)."""
    times, transfers = mean_times(arrays), mean_transfers(arrays)
    rank = np.zeros(arrays.ops)
    for op in range(arrays.ops):
        for edge in range(arrays.first[op], arrays.first[op + 1]):
            reader = arrays.readers[0][edge]
            rank[reader] = max(rank[reader], rank[op] + times[op] + transfers[edge])
    return rank


def producers(arrays: EventArrays) -> list[list[tuple[int, float]]]:
    """For each op, the ops that it reads and the size of what it reads."""
    found: list[list[tuple[int, float]]] = [[] for _ in range(arrays.ops)]
    for op in range(arrays.ops):
        for edge in range(arrays.first[op], arrays.first[op + 1]):
            found[arrays.readers[0][edge]].append((op, float(arrays.sizes[0][edge])))
    return found
