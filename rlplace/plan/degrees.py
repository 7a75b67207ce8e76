"""Degrees of the tensor-parallel axis: which are legal for a graph, and the refusal of the rest.

A degree is illegal where it does not divide what the groups cut that hold most of the work: heads,
KV heads, channels. A group that does not limit it (a head with an odd vocabulary) runs whole at
degrees that it has no layout for; `unsharded` names such groups.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeVar

import numpy as np

from rlplace.errors import InputError
from rlplace.graph.types import OpGraph

T = TypeVar("T")

#: Legal degrees are listed up to this one.
_SHOWN = 64


def analysed_degrees(graph: OpGraph) -> tuple[int, ...]:
    """Degrees above 1 at which some group has a sharded layout, in ascending order."""
    return tuple(sorted({layout.degree for s in graph.structures for layout in s.layouts}))


def usable_degrees(graph: OpGraph) -> tuple[int, ...]:
    """Degrees that a planner may try: 1, and those that are legal and have layouts."""
    return (1, *(d for d in analysed_degrees(graph) if graph.tp_refusal(d) is None))


def refuse_degree(
    graph: OpGraph, degree: int, field: str, fitting: Iterable[int] | None = None, note: str = ""
) -> None:
    """Refuse an illegal degree, before anything is costed.

    Args:
        graph: The model.
        degree: Of the tp axis, at least 1.
        field: What the user calls it.
        fitting: Degrees that would do in all other respects; by default all.
        note: What more is to be said: a format string that may name ``{nearest}``.

    Raises:
        InputError: With the size that it does not divide, the legal degrees, and the nearest one.
    """
    why = graph.tp_refusal(degree)
    if why is None:
        return
    why = why.removeprefix(f"tp={degree} ")
    legal = graph.tp_degrees(max(_SHOWN, degree))
    near = _nearest(degree, legal, fitting)
    rule = f"{why}; the legal degrees are {', '.join(map(str, legal))}"
    raise InputError(field, degree, rule + note.format(nearest=near), near)


def refuse_unknown_degree(graph: OpGraph, degree: int, field: str) -> None:
    """Refuse a legal degree at which no group was analysed, where others were.

    Raises:
        InputError: With the degrees that there are, and how to get this one.
    """
    known = usable_degrees(graph)
    if degree in known or len(analysed_degrees(graph)) == 0:
        return
    wanted = (*known[1:], degree)
    rule = (
        f"no group has a sharded layout at this degree, only at {', '.join(map(str, known[1:]))}; "
        f"capture the model with degrees={wanted}"
        if len(known) > 1
        else f"no group has a sharded layout at this degree; capture the model with "
        f"degrees={wanted}"
    )
    raise InputError(field, degree, rule, _nearest(degree, known, None))


def unsharded(graph: OpGraph, degree: int) -> tuple[str, ...]:
    """Groups with parameters and work that run whole at a degree, by name, each structure once."""
    if degree == 1:
        return ()
    first = {group.structure: group.name for group in reversed(graph.groups)}
    return tuple(
        first[index]
        for index, structure in enumerate(graph.structures)
        if index in first
        and structure.work.flops(1.0) > 0.0
        and structure.work.params
        and len(structure.layouts_at(degree)) == 1
    )


def _nearest(degree: int, legal: Iterable[int], fitting: Iterable[int] | None) -> int:
    """The closest legal degree that fits, the smaller one of two; 1 always does."""
    allowed = set(legal) if fitting is None else set(legal) & set(fitting)
    return min(allowed, key=lambda other: (abs(other - degree), other), default=1)


def nearest(value: int, legal: tuple[int, ...]) -> int | None:
    """The legal value closest to `value`, the smaller one of two."""
    return min(legal, key=lambda other: (abs(other - value), other), default=None)


def spread(items: Sequence[T], most: int) -> tuple[T, ...]:
    """At most so many of some items, evenly spread over them, the first and the last among them.

    Divisors in ascending order, such as legal micro-batch counts, are then spread in the logarithm.
    """
    where = np.unique(np.linspace(0, len(items) - 1, most).round().astype(int))
    return tuple(items[index] for index in where)
