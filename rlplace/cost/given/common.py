"""Checks that the rules of all forms share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from rlplace.errors import InputError
from rlplace.graph.formats.types import EventCosts, GivenInstance, LoadCosts, PiperCosts

_Costs = TypeVar("_Costs", LoadCosts, EventCosts, PiperCosts)


def costs_of(instance: GivenInstance, kind: type[_Costs]) -> _Costs:
    """The costs of an instance, if its form is the one that a rule is about.

    Raises:
        InputError: If it is another.
    """
    if not isinstance(instance.costs, kind):
        rule = f"this rule needs {kind.__name__}"
        raise InputError("instance", f"{instance.name} ({instance.format})", rule)
    return instance.costs


def check_placement(instance: GivenInstance, placement: Sequence[int], devices: int) -> None:
    """Check that a placement names an existing device for every group.

    Raises:
        InputError: If it does not.
    """
    groups = len(instance.graph.groups)
    if len(placement) != groups:
        rule = "must name a device for every group"
        raise InputError("length of the placement", len(placement), rule, groups)
    for group, device in enumerate(placement):
        if not 0 <= device < devices:
            where = f"placement of {instance.graph.groups[group].name}"
            raise InputError(where, device, f"devices are 0 to {devices - 1}")
