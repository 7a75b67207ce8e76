"""HEFT: ops by upward rank, each where it ends first.

Topcuoglu, Hariri, Wu, "Performance-Effective and Low-Complexity Task Scheduling for Heterogeneous
Computing", IEEE TPDS 13(3), 2002. Decision space: one placement, built op by op; an op may be
inserted into an idle gap between two that are there already. Complexity: O(E D + V^2 D).

HEFT also fixes the order of each device, which the event simulation (first come, first served) does
not take: only its placement counts.
"""

from __future__ import annotations

import numpy as np

from rlplace.cost.given.event_loop import EventArrays, Ints
from rlplace.graph.formats.types import GivenInstance
from rlplace.planners.given.event_search import EventSearch
from rlplace.planners.given.ranks import upward_rank
from rlplace.planners.given.slots import Slots
from rlplace.planners.given.types import Placed, Placement
from rlplace.planners.types import Limits


def heft(instance: GivenInstance, budget: Limits, rng: np.random.Generator) -> Placed[Placement]:
    """The one placement of HEFT."""
    search = EventSearch("heft", instance, budget)
    search.look(heft_placement(search.arrays)[None])
    return search.result()


def heft_placement(arrays: EventArrays) -> Ints:
    """The device of each op by HEFT (V,)."""
    return heft_schedule(arrays).placement


def heft_schedule(arrays: EventArrays) -> Slots:
    """All ops as HEFT puts them."""
    slots = Slots(arrays)
    legal = np.isfinite(arrays.times)
    # Stable: of equal ranks (ops that cost nothing) the producer stays first.
    for op in np.argsort(-upward_rank(arrays), kind="stable"):
        slots.put_earliest(int(op), np.flatnonzero(legal[op]))
    return slots
