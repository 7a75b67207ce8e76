"""Constants of device kinds and links that were fitted to measurements, from one shipped file.

`configs/calibration.json` has a section for each: ``kinds`` by the name of a kind, ``links`` by
the family of a link (``ib`` for every ``ib3200``). They replace the figures of the catalogue; the
file says what they were fitted on.
"""

from __future__ import annotations

import json
import re
from dataclasses import fields, is_dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar

from rlplace.cluster.types import DeviceKind, Link
from rlplace.errors import InputError, nearest_names
from rlplace.resources import resource

if TYPE_CHECKING:
    from collections.abc import Mapping

_Described = TypeVar("_Described")


def link_family(name: str) -> str:
    """The family of a link, ``ib`` of ``ib3200``: its name without the figures at the end."""
    return re.sub(r"[\d.]+$", "", name)


def numbers_of(described: object) -> dict[str, float]:
    """The fields of a dataclass that hold a number, each a constant that can be fitted."""
    assert is_dataclass(described)
    values = ((field.name, getattr(described, field.name)) for field in fields(described))
    return {
        name: value
        for name, value in values
        if isinstance(value, int | float) and not isinstance(value, bool)
    }


def overlaid(described: _Described, constants: Mapping[str, float], where: str) -> _Described:
    """A dataclass with some of its numbers replaced.

    Args:
        described: A device kind, a link, a framework.
        constants: By field; a field that holds a whole number gets one.
        where: What the constants belong to, for the error.

    Raises:
        InputError: If there is no such number, with the nearest name.
    """
    known = numbers_of(described)
    for name in constants:
        if name not in known:
            rule = f"has no such constant; it has {', '.join(known)}"
            raise InputError(where, name, rule, nearest_names(name, known))
    made = {name: type(known[name])(value) for name, value in constants.items()}
    return replace(described, **made)  # type: ignore[type-var]  # a dataclass, see numbers_of


def calibrated_kind(kind: DeviceKind) -> DeviceKind:
    """A kind of the catalogue with its shipped constants."""
    return overlaid(kind, shipped("kinds").get(kind.name, {}), f"kinds.{kind.name}")


def calibrated_link(link: Link) -> Link:
    """A link of the catalogue with the shipped constants of its family."""
    family = link_family(link.name)
    return overlaid(link, shipped("links").get(family, {}), f"links.{family}")


@cache
def shipped(name: str) -> dict[str, dict[str, Any]]:
    """A section of the shipped file, ``kinds``, ``links`` or ``frameworks``: constants by owner."""
    found: dict[str, dict[str, Any]]
    found = json.loads(resource("configs/calibration.json").read_text()).get(name, {})
    return found
