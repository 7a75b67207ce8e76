"""Operators merged, then device and start of each merged one by an integer program.

She et al., "Automatic Operator-level Parallelism Planning for Distributed Deep Learning - A
Mixed-Integer Programming Approach", 2025 (arXiv 2503.09357). Decision space: one device for each
merged operator, in any order and with any starts. Algorithm, in two levels: ops are merged to few
tasks (`merging`), HiGHS schedules those (`schedule_milp`), and every op goes to the device of its
task; then the same with more tasks, as long as the budget lasts and the program is not too large,
but not with all ops, which is DLPlacer's program. HEFT's placement is the answer before that. Nodes
of HiGHS's search count as evaluations.
Complexity: merging O(V E log E), programs exponential in the number of tasks.

Left out: memory over time and the choice of parallel forms of an operator, which the event forms do
not have. The starts that the program finds are not kept: a device of the event simulation serves
first come, first served.
"""

from __future__ import annotations

import numpy as np

from rlplace.graph.formats.types import GivenInstance
from rlplace.planners.given.dlplacer import solve_within
from rlplace.planners.given.event_search import EventSearch
from rlplace.planners.given.heft import heft_placement
from rlplace.planners.given.merging import merged
from rlplace.planners.given.schedule_milp import greedy_makespan
from rlplace.planners.given.types import Placed, Placement
from rlplace.planners.types import Limits

#: Tasks of the first program, by how much the next ones have more, and how many programs at most.
_FIRST, _GROWTH, _PROGRAMS = 8, 2, 3
#: Share of what is left of the seconds and nodes that a program may spend.
_SHARE = 0.3


def merge_milp(
    instance: GivenInstance, budget: Limits, rng: np.random.Generator
) -> Placed[Placement]:
    """The best placement of merged operators."""
    search = EventSearch("merge_milp", instance, budget)
    search.look(heft_placement(search.arrays)[None])
    count = _FIRST
    for _ in range(_PROGRAMS):
        if search.stopped:
            break
        tasks, task_of = merged(search.arrays, count)
        found = solve_within(search, tasks, greedy_makespan(tasks), _SHARE)
        if found is None:
            break
        if found.placement is not None:
            search.look(found.placement[task_of][None])
        count *= _GROWTH
        if count >= search.arrays.ops:
            break
    return search.result()
