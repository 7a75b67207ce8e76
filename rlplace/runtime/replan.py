"""A plan for the ranks that are left."""

from __future__ import annotations

import json
from collections.abc import Callable

from rlplace.plan.files import dump_plan, parse_plan
from rlplace.plan.types import Plan
from rlplace.runtime.world import World

#: From a plan and a number of ranks to a plan of the same graph for as many ranks.
Replan = Callable[[Plan, int], Plan]


def adapted(world: World, plan: Plan, replan: Replan | None) -> Plan:
    """The plan, or another one where it needs more ranks than there are.

    Args:
        world: The ranks.
        plan: The plan.
        replan: Asked on rank 0; None leaves the plan as it is.
    """
    if replan is None or max(plan.devices, default=0) < world.size:
        return plan
    text = world.from_first(lambda: json.dumps(dump_plan(replan(plan, world.size))))
    return parse_plan(json.loads(text))
