"""DLPlacer: the device of every op by an integer program that minimises the makespan.

Pal et al., "Optimizing Multi-GPU Parallelization Strategies for Deep Learning Training", IEEE Micro
2019 (arXiv 1907.13257), where DLPlacer is the planner of model parallelism. Decision space: the
device and the start of every op; transfers take the time of their link and run beside the ops.
Algorithm: the program of `schedule_milp`, solved by HiGHS to its optimum or until the budget is
spent, nodes of its search counting as evaluations; what it has then is the answer. HEFT's
placement is the answer before that, and the end of its schedule the cutoff. Complexity:
exponential; optimal up to a few dozen ops.

The optimum is of schedules in any order: a device of the event simulation serves first come, first
served, so that the placement may be worth more than the program says, and another less than it.
Left out: memory, which the event forms do not have, and routes over several links. A graph whose
program has more than `MOST_ROWS` rows keeps HEFT's placement.
"""

from __future__ import annotations

import numpy as np

from rlplace.graph.formats.types import GivenInstance
from rlplace.planners.given.event_search import EventSearch
from rlplace.planners.given.heft import heft_schedule
from rlplace.planners.given.schedule_milp import (
    MOST_ROWS,
    Schedule,
    Tasks,
    least_makespan,
    tasks_of,
)
from rlplace.planners.given.types import Placed, Placement
from rlplace.planners.types import Limits


def dlplacer(
    instance: GivenInstance, budget: Limits, rng: np.random.Generator
) -> Placed[Placement]:
    """The placement of the best schedule."""
    search = EventSearch("dlplacer", instance, budget)
    slots = heft_schedule(search.arrays)
    search.look(slots.placement[None])
    found = solve_within(search, tasks_of(search.arrays), float(slots.end.max()))
    if found is not None and found.placement is not None:
        search.look(found.placement[None])
    return search.result()


def solve_within(
    search: EventSearch, tasks: Tasks, cutoff: float, share: float = 1.0
) -> Schedule | None:
    """The best schedule of some tasks in what is left of the budget, but for one evaluation.

    Args:
        search: Whose budget it is.
        tasks: What is scheduled.
        cutoff: The makespan of a schedule that is known.
        share: Of what is left, that may be spent.

    Returns:
        What the program says; None if nothing is left, or it is too large.
    """
    nodes = int(share * (search.left - 1))
    if search.stopped or nodes < 1 or tasks.rows > MOST_ROWS:
        return None
    seconds = share * (search.budget.seconds - search.seconds)
    found = least_makespan(tasks, cutoff, seconds, nodes)
    search.evaluations += min(found.nodes, nodes)
    return found
