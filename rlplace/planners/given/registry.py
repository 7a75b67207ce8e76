"""All placers, by the costs that they are for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlplace.graph.formats.types import EventCosts, GivenInstance, LoadCosts, PiperCosts
from rlplace.planners.given.max_load import contiguous, scattered
from rlplace.planners.given.piper import piper
from rlplace.planners.given.types import Placer

PLACERS: dict[type, dict[str, Placer[Any]]] = {
    EventCosts: {},
    LoadCosts: {"contiguous": contiguous, "scattered": scattered},
    PiperCosts: {"piper": piper},
}


def placers_of(instance: GivenInstance) -> Mapping[str, Placer[Any]]:
    """The placers for the form of an instance, by name; none where its form has none yet."""
    return PLACERS.get(type(instance.costs), {})
