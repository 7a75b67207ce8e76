"""Genetic search with biased random keys.

BRKGA of Gonçalves and Resende 2011, the base that REGAL (Paliwal et al., ICLR 2020, arXiv
1905.02494) learns to start. Decision space: all placements. A chromosome is a key in [0, 1] for
each op and device, an op goes to its legal device of the largest key. A generation keeps the elite,
adds some new random ones, and fills up with children of an elite and an other parent, which take
each key from the elite parent more often. Complexity: O(N (V D + (V + E) log V)) a generation of N.

Left out: REGAL's keys for the order of ops and transfers, since the event simulation serves first
come, first served; its memory objective; and the learned distribution of the first keys.
"""

from __future__ import annotations

import numpy as np

from rlplace.graph.formats.types import GivenInstance
from rlplace.planners.given.event_search import EventSearch
from rlplace.planners.given.types import Placed, Placement
from rlplace.planners.types import Limits
from rlplace.planners.vectors import evolve


def genetic(instance: GivenInstance, budget: Limits, rng: np.random.Generator) -> Placed[Placement]:
    """The best placement of all generations."""
    search = EventSearch("genetic", instance, budget)
    evolve(search, search.legal, rng)
    return search.result()
