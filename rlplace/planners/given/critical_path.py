"""CPOP: the critical path on one device, all else where it ends first.

Topcuoglu, Hariri, Wu, IEEE TPDS 13(3), 2002, section 4.3. Decision space: one placement. The
priority of an op is the longest path through it; ready ops are taken by priority, those of the
critical path go to the device on which the whole path takes least, the others as in HEFT.
Complexity: O(E D + V^2 D).

Where no device may run the whole path, it goes to the one that may run most of it, and what that
device may not run is placed as any other op.
"""

from __future__ import annotations

import heapq

import numpy as np

from rlplace.cost.given.event_loop import EventArrays, Floats, Ints
from rlplace.graph.formats.types import GivenInstance
from rlplace.planners.given.event_search import EventSearch
from rlplace.planners.given.ranks import downward_rank, upward_rank
from rlplace.planners.given.slots import Slots
from rlplace.planners.given.types import Placed, Placement
from rlplace.planners.types import Limits


def critical_path(
    instance: GivenInstance, budget: Limits, rng: np.random.Generator
) -> Placed[Placement]:
    """The one placement of CPOP."""
    search = EventSearch("critical_path", instance, budget)
    search.look(critical_path_placement(search.arrays)[None])
    return search.result()


def critical_path_placement(arrays: EventArrays) -> Ints:
    """The device of each op by CPOP (V,)."""
    priority = upward_rank(arrays) + downward_rank(arrays)
    path = _path(arrays, priority)
    legal = np.isfinite(arrays.times)
    device = min(range(arrays.devices), key=lambda d: _time(arrays.times[path, d]))
    slots, missing = Slots(arrays), arrays.inputs.copy()
    ready = [(-priority[op], int(op)) for op in arrays.roots[0]]
    heapq.heapify(ready)
    while ready:
        _, op = heapq.heappop(ready)
        fixed = op in path and legal[op, device]
        slots.put_earliest(op, np.array([device]) if fixed else np.flatnonzero(legal[op]))
        for reader in arrays.readers[0][arrays.first[op] : arrays.first[op + 1]]:
            missing[reader] -= 1
            if not missing[reader]:
                heapq.heappush(ready, (-priority[reader], int(reader)))
    return slots.placement


def _path(arrays: EventArrays, priority: Floats) -> list[int]:
    """The critical path: from the first op of the highest priority to an end."""
    op = int(arrays.roots[0][np.argmax(priority[arrays.roots[0]])])
    path = [op]
    while arrays.first[op] < arrays.first[op + 1]:
        readers = arrays.readers[0][arrays.first[op] : arrays.first[op + 1]]
        op = int(readers[np.argmax(priority[readers])])
        path.append(op)
    return path


def _time(times: Floats) -> tuple[int, float]:
    """Ops of the path that a device may not run, and the time of the others."""
    runs = np.isfinite(times)
    return int((~runs).sum()), float(times[runs].sum())
