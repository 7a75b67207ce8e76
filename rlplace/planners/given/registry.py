"""All placers, by the costs that they are for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlplace.graph.formats.types import EventCosts, GivenInstance, LoadCosts, PiperCosts
from rlplace.planners.given.anneal import annealing
from rlplace.planners.given.best import best
from rlplace.planners.given.critical_path import critical_path
from rlplace.planners.given.cross_entropy import cross_entropy
from rlplace.planners.given.dlplacer import dlplacer
from rlplace.planners.given.etf import m_etf
from rlplace.planners.given.exhaustive import exhaustive
from rlplace.planners.given.genetic import genetic
from rlplace.planners.given.heft import heft
from rlplace.planners.given.hill_climb import hill_climbing
from rlplace.planners.given.max_load import contiguous, scattered
from rlplace.planners.given.merge_milp import merge_milp
from rlplace.planners.given.min_cut import min_cut
from rlplace.planners.given.piper import piper
from rlplace.planners.given.sct import m_sct
from rlplace.planners.given.tree_search import tree_search
from rlplace.planners.given.types import Placer

#: GiPH and DOPPLER: list schedules, searches, programs, and what is only for tiny ones.
EVENT_PLACERS: dict[str, Placer[Any]] = {
    "heft": heft,
    "critical_path": critical_path,
    "m_etf": m_etf,
    "m_sct": m_sct,
    "hill_climb": hill_climbing,
    "anneal": annealing,
    "cross_entropy": cross_entropy,
    "genetic": genetic,
    "tree_search": tree_search,
    "dlplacer": dlplacer,
    "merge_milp": merge_milp,
    "min_cut": min_cut,
    "best": best,
    "exhaustive": exhaustive,
}

PLACERS: dict[type, dict[str, Placer[Any]]] = {
    EventCosts: EVENT_PLACERS,
    LoadCosts: {"contiguous": contiguous, "scattered": scattered},
    PiperCosts: {"piper": piper},
}


def placers_of(instance: GivenInstance) -> Mapping[str, Placer[Any]]:
    """The placers for the form of an instance, by name; none where its form has none yet."""
    return PLACERS.get(type(instance.costs), {})
