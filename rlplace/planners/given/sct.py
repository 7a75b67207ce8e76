"""m-SCT: earliest first, and each op's favourite child close to it.

Jeon et al., "Baechi", SoCC 2020 (arXiv 2301.08695), after Hanen and Munier 1995, who bound it for
small communication times. A linear program says which child every op would rather keep on its
device: least makespan on devices without number, where x = 0 spares an edge its transfer and every
op spares at most one edge in and one out. An edge with x < 1/2 makes a favourite child, of which
there is at most one then. `earliest_first` keeps devices for them. Decision space: one placement.
Complexity: an LP of V + E + 1 variables (HiGHS), then O(V W D).

The program sees the mean device and the mean link. Left out, as in m-ETF: memory, which Baechi
counts.
"""

from __future__ import annotations

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_array

from rlplace.cost.given.event_loop import EventArrays, Floats, Ints
from rlplace.graph.formats.types import GivenInstance
from rlplace.planners.given.etf import earliest_first
from rlplace.planners.given.event_search import EventSearch
from rlplace.planners.given.ranks import mean_times, mean_transfers
from rlplace.planners.given.types import Placed, Placement
from rlplace.planners.types import Limits


def m_sct(instance: GivenInstance, budget: Limits, rng: np.random.Generator) -> Placed[Placement]:
    """The one placement of m-SCT."""
    search = EventSearch("m_sct", instance, budget)
    favourites = favourite_children(search.arrays, budget.seconds)
    search.look(earliest_first(search.arrays, favourites)[None])
    return search.result()


def favourite_children(arrays: EventArrays, seconds: float = np.inf) -> Ints:
    """The favourite child of each op, -1 for none (V,); none at all if the seconds run out."""
    sources = np.repeat(np.arange(arrays.ops), np.diff(arrays.first))
    chosen: Ints = np.full(arrays.ops, -1, np.int64)
    spared = _relaxed(arrays, sources, seconds)
    chosen[sources[spared < 0.5]] = arrays.readers[0][spared < 0.5]
    return chosen


def _relaxed(arrays: EventArrays, sources: Ints, seconds: float) -> Floats:
    """The x of each edge; variables are x (E), starts (V) and the makespan."""
    ops, edges, readers = arrays.ops, len(sources), arrays.readers[0]
    times, transfers = mean_times(arrays), mean_transfers(arrays)
    edge, op = np.arange(edges), np.arange(ops)
    # Start i + time i + transfer x <= start j; start + time <= makespan; sums of x >= degree - 1.
    out, into = ops + edges, ops + edges + ops
    entries = [
        (edge, edge, transfers),
        (edge, edges + sources, np.ones(edges)),
        (edge, edges + readers, -np.ones(edges)),
        (edges + op, edges + op, np.ones(ops)),
        (edges + op, np.full(ops, edges + ops), -np.ones(ops)),
        (out + sources, edge, -np.ones(edges)),
        (into + readers, edge, -np.ones(edges)),
    ]
    rows, columns, values = (np.concatenate(part) for part in zip(*entries, strict=True))
    matrix = coo_array((values, (rows, columns)), (into + ops, edges + ops + 1))
    most = np.concatenate([-times[sources], -times, 1 - np.diff(arrays.first), 1 - arrays.inputs])
    highest = np.concatenate([np.ones(edges), np.full(ops + 1, np.inf)])
    goal = np.concatenate([np.zeros(edges + ops), [1.0]])
    # `milp` without whole numbers: `linprog` is not typed for sparse matrices.
    found = milp(
        goal,
        constraints=LinearConstraint(matrix.tocsr(), -np.inf, most),
        bounds=Bounds(0.0, highest),
        options={"time_limit": seconds},
    )
    return np.ones(edges) if found.x is None else np.asarray(found.x[:edges])
