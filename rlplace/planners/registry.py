"""All planners by name."""

from __future__ import annotations

from rlplace.planners.aceso import aceso
from rlplace.planners.alpa import alpa
from rlplace.planners.anneal import annealing
from rlplace.planners.autoddl import autoddl
from rlplace.planners.cross_entropy import cross_entropy
from rlplace.planners.dapple import dapple
from rlplace.planners.dynamic import dynamic
from rlplace.planners.exhaustive import exhaustive
from rlplace.planners.galvatron import galvatron
from rlplace.planners.genetic import genetic
from rlplace.planners.grid import grid
from rlplace.planners.hill_climb import hill_climb
from rlplace.planners.metis import metis
from rlplace.planners.osdp import osdp
from rlplace.planners.overlap import overlap
from rlplace.planners.pipedream import pipedream
from rlplace.planners.piper import piper
from rlplace.planners.poplar import poplar
from rlplace.planners.portfolio import portfolio
from rlplace.planners.replicas import data_parallel, zero1, zero2, zero3
from rlplace.planners.rules import layouts_advice, megatron
from rlplace.planners.sailor import sailor
from rlplace.planners.tangram import tangram
from rlplace.planners.tree_search import tree_search
from rlplace.planners.types import Planner

PLANNERS: dict[str, Planner] = {
    # Rules
    "data_parallel": data_parallel,
    "zero1": zero1,
    "zero2": zero2,
    "zero3": zero3,
    "megatron": megatron,
    "layouts_advice": layouts_advice,
    "grid": grid,
    # Searches
    "dynamic": dynamic,
    "alpa": alpa,
    "pipedream": pipedream,
    "piper": piper,
    "overlap": overlap,
    "dapple": dapple,
    "galvatron": galvatron,
    "aceso": aceso,
    "osdp": osdp,
    "autoddl": autoddl,
    # Searches for clusters of several kinds
    "tangram": tangram,
    "sailor": sailor,
    "poplar": poplar,
    "metis": metis,
    # Searches that know nothing of plans
    "hill_climb": hill_climb,
    "cross_entropy": cross_entropy,
    "genetic": genetic,
    "tree_search": tree_search,
    # Searches that start from others, and all there is
    "anneal": annealing,
    "portfolio": portfolio,
    "exhaustive": exhaustive,
}
