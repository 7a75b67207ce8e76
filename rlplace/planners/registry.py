"""All planners by name."""

from __future__ import annotations

from rlplace.planners.anneal import annealing
from rlplace.planners.data_parallel import data_parallel
from rlplace.planners.dynamic import dynamic
from rlplace.planners.exhaustive import exhaustive
from rlplace.planners.grid import grid
from rlplace.planners.portfolio import portfolio
from rlplace.planners.types import Planner
from rlplace.planners.zero3 import zero3

PLANNERS: dict[str, Planner] = {
    "data_parallel": data_parallel,
    "zero3": zero3,
    "grid": grid,
    "dynamic": dynamic,
    "anneal": annealing,
    "portfolio": portfolio,
    "exhaustive": exhaustive,
}
