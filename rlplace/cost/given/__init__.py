"""Placements under the given costs of a public op-graph form, by that form's own published rule.

Plain functions, one for each rule, so that planners can be compared on their makers' own ground.
"""

from rlplace.cost.given.events import (
    GivenSchedule,
    makespan,
    makespan_bound,
    median_makespan,
    simulate_events,
)
from rlplace.cost.given.loads import broken_rule, color_of, device_loads, max_load
from rlplace.cost.given.piper import PiperStage, piper_bound, piper_load, stage_load, stage_memory

__all__ = [
    "GivenSchedule",
    "PiperStage",
    "broken_rule",
    "color_of",
    "device_loads",
    "makespan",
    "makespan_bound",
    "max_load",
    "median_makespan",
    "piper_bound",
    "piper_load",
    "simulate_events",
    "stage_load",
    "stage_memory",
]
