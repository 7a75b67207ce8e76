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

from rlplace.cost.given.event_loop import Floats, Ints
from rlplace.graph.formats.types import GivenInstance
from rlplace.planners.given.event_search import EventSearch
from rlplace.planners.given.types import Placed, Placement
from rlplace.planners.types import Limits

#: Chromosomes, of which so many are elite and so many new, and how often a child takes after the
#: elite parent.
_POPULATION, _ELITE, _NEW, _BIAS = 100, 20, 15, 0.7
#: Generations where the budget does not end them.
_GENERATIONS = 400


def genetic(instance: GivenInstance, budget: Limits, rng: np.random.Generator) -> Placed[Placement]:
    """The best placement of all generations."""
    search = EventSearch("genetic", instance, budget)
    shape = search.legal.shape
    keys = rng.random((min(_POPULATION, search.left), *shape))
    guides = search.look(_decode(keys, search))
    for _ in range(_GENERATIONS):
        if search.stopped:
            break
        order = np.argsort(guides, kind="stable")
        keys, guides = keys[order], guides[order]
        born = _offspring(keys, rng)[: search.left]
        found = search.look(_decode(born, search))
        keys = np.concatenate([keys[:_ELITE], born])
        guides = np.concatenate([guides[:_ELITE], found])
    return search.result()


def _offspring(keys: Floats, rng: np.random.Generator) -> Floats:
    """The new chromosomes of a generation: children, and random ones; `keys` are best first."""
    count, shape = _POPULATION - _ELITE - _NEW, keys.shape[1:]
    elite = min(_ELITE, len(keys))
    first = keys[rng.integers(elite, size=count)]
    # Of a population that is all elite, the other parent is one of them too.
    second = keys[rng.integers(elite if elite < len(keys) else 0, len(keys), size=count)]
    children = np.where(rng.random((count, *shape)) < _BIAS, first, second)
    return np.concatenate([children, rng.random((_NEW, *shape))])


def _decode(keys: Floats, search: EventSearch) -> Ints:
    """The placements that chromosomes mean (N, V)."""
    return np.asarray(np.where(search.legal, keys, -1.0).argmax(axis=2), np.int64)
