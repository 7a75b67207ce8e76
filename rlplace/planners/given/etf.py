"""m-ETF: of all ready ops and devices, the pair that starts first.

Jeon et al., "Baechi: Fast Device Placement of Machine Learning Graphs", SoCC 2020 (arXiv
2301.08695), after Hwang et al. 1989. Decision space: one placement, built op by op; no gap is
filled. Ties go to the earlier end, then to the higher upward rank. Complexity: O(V W D) for W ready
ops.

The memory of Baechi's devices (the m of the name) is left out: the event forms have none.
"""

from __future__ import annotations

import numpy as np

from rlplace.cost.given.event_loop import EventArrays, Floats, Ints
from rlplace.graph.formats.types import GivenInstance
from rlplace.planners.given.event_search import EventSearch
from rlplace.planners.given.ranks import producers, upward_rank
from rlplace.planners.given.slots import Slots
from rlplace.planners.given.types import Placed, Placement
from rlplace.planners.types import Limits


def m_etf(instance: GivenInstance, budget: Limits, rng: np.random.Generator) -> Placed[Placement]:
    """The one placement of m-ETF."""
    search = EventSearch("m_etf", instance, budget)
    search.look(earliest_first(search.arrays)[None])
    return search.result()


def earliest_first(arrays: EventArrays, favourites: Ints | None = None) -> Ints:
    """Schedule the pair of op and device that starts first, until all ops are placed.

    Args:
        arrays: The instance.
        favourites: The favourite child of each op, -1 for none (V,); by default none has one. A
            device whose last op has a favourite child is kept for it: another op goes there only
            if it is urgent, that is at a time at which its inputs could have reached any device.

    Returns:
        The device of each op (V,).
    """
    rank, reads = upward_rank(arrays), producers(arrays)
    slots, missing = Slots(arrays), arrays.inputs.copy()
    free, kept = np.zeros(arrays.devices), np.full(arrays.devices, -1)
    ready = [int(op) for op in arrays.roots[0]]
    here = {op: slots.arrivals(op) for op in ready}
    urgent = {op: np.zeros(arrays.devices) for op in ready}
    while ready:
        ops = np.array(ready)
        awake = (kept >= 0) & (slots.placement[kept] < 0) & (kept != ops[:, None])
        there = np.where(awake, [urgent[op] for op in ready], [here[op] for op in ready])
        starts = np.maximum(there, free)
        starts[~np.isfinite(arrays.times[ops])] = np.inf
        chosen, device = _first(starts, starts + arrays.times[ops], rank[ops])
        op = ready.pop(chosen)
        slots.put(op, device, float(starts[chosen, device]))
        free[device] = slots.end[op]
        kept[device] = -1 if favourites is None else favourites[op]
        for reader in arrays.readers[0][arrays.first[op] : arrays.first[op + 1]].tolist():
            missing[reader] -= 1
            if not missing[reader]:
                ready.append(reader)
                here[reader] = slots.arrivals(reader)
                urgent[reader] = _anywhere(arrays, slots, reads[reader])
    return slots.placement


def _first(starts: Floats, ends: Floats, ranks: Floats) -> tuple[int, int]:
    """The pair (op, device) of the least start, then end, then of the highest rank."""
    firsts = np.argwhere(starts == starts.min())
    keys = [(ends[op, device], -ranks[op]) for op, device in firsts]
    op, device = firsts[min(range(len(keys)), key=keys.__getitem__)]
    return int(op), int(device)


def _anywhere(arrays: EventArrays, slots: Slots, reads: list[tuple[int, float]]) -> Floats:
    """When the inputs of an op could be on any device, each read over its slowest link (D,)."""
    there = 0.0
    for source, size in reads:
        home = slots.placement[source]
        sent = arrays.delays[home] + size * arrays.rates[home]
        there = max(there, float(slots.end[source] + sent.max()))
    return np.full(arrays.devices, there)
