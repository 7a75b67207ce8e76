"""Which values of a program are in an order that a rank gives to all its rows.

A mixture of experts sorts its tokens by expert: the rows, the places where they were, and how many
rows each expert has depend on all rows of a rank, and no part of them belongs to a sample.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import fx

from rlplace.graph.program import Program
from rlplace.graph.sharding.expert_rules import GROUPED
from rlplace.graph.sharding.nodes import SPLITS, argument, op_name, split_parts, tensor_args
from rlplace.graph.sharding.signatures import ELEMENTWISE

_SORTS = ("sort", "argsort")
_CASTS = ("to", "_to_copy")


@dataclass(frozen=True)
class Ordered:
    """A value in the order of a sort.

    Args:
        sort: The sort of all rows of a rank.
        holds: ``rows`` (a row for each sorted one), ``places`` (where the sorted rows, or the rows
            that they were taken from, were), ``inverse`` (what puts them back), ``numbers``
            (anything else that follows from what was sorted alone), or ``unknown``.
        exact: Of places: those of the sorted rows themselves.
    """

    sort: fx.Node
    holds: Literal["rows", "places", "inverse", "numbers", "unknown"]
    exact: bool = False

    @property
    def key(self) -> fx.Node:
        """What was sorted: a number for each row, in the order of the samples."""
        return tensor_args(self.sort)[0]

    @property
    def alone(self) -> bool:
        """Whether it follows from the key alone."""
        return self.holds in ("places", "inverse", "numbers")


def ordered(program: Program) -> dict[str, Ordered]:
    """The values of a program that are in an order of rows, by name."""
    found: dict[str, Ordered] = {}
    for node in program.nodes:
        sources = tensor_args(node)
        made = _made(node, [found.get(source.name) for source in sources])
        if made is not None:
            found[node.name] = made
    return found


def _made(node: fx.Node, sources: Sequence[Ordered | None]) -> Ordered | None:
    """What a node makes of values, of which some are in an order; None if it is in none."""
    known = [source for source in sources if source is not None]
    if not known:
        return _sorted(node)
    first, name = known[0], op_name(node)
    if any(one.sort is not first.sort for one in known):
        return _unless_undone(node, first)
    if len(known) == len(sources) and all(one.alone for one in known):
        return _of_numbers(node, first)
    if name == "index" and len(sources) == 2:
        rows, places = sources
        if rows is None and places is not None and places.holds == "places":
            return Ordered(first.sort, "rows")
        if rows is not None and places is not None:
            undone = (rows.holds, places.holds) == ("rows", "inverse")
            return None if undone else _unless_undone(node, first)
    kept = any(one.holds == "rows" for one in known) and _keeps_rows(node, sources)
    return Ordered(first.sort, "rows") if kept else _unless_undone(node, first)


def _sorted(node: fx.Node) -> Ordered | None:
    """A sort of one number for each row of a rank."""
    if op_name(node) not in _SORTS:
        return None
    (keys,) = tensor_args(node)
    sizes = keys.meta["val"].shape
    if len(sizes) != 1 or not isinstance(sizes[0], torch.SymInt):
        return None
    pair = op_name(node) == "sort"
    return Ordered(node, "numbers") if pair else Ordered(node, "places", exact=True)


def _of_numbers(node: fx.Node, source: Ordered) -> Ordered:
    """What follows from numbers alone."""
    name, only = op_name(node), replace(source, exact=False)
    if name == "getitem" and node.args[0] is source.sort and op_name(source.sort) == "sort":
        return Ordered(source.sort, "places", exact=True) if node.args[1] else only
    if name == "argsort" and source.exact:
        return replace(only, holds="inverse")
    if source.holds == "places" and name in _CASTS:
        return source
    places = source.holds == "places" and name == "floor_divide"
    return only if places else replace(only, holds="numbers")


def _keeps_rows(node: fx.Node, sources: Sequence[Ordered | None]) -> bool:
    """Whether an op treats each row alone, and leaves them in their order."""
    name, args = op_name(node), tensor_args(node)
    if name in SPLITS:
        return split_parts(node)[0] != 0
    if name == "unsqueeze":
        return bool(argument(node, 1, "dim") % node.meta["val"].ndim != 0)
    if name in ELEMENTWISE:
        rank = node.meta["val"].ndim
        pairs = zip(args, sources, strict=True)
        return all(one is not None or arg.meta["val"].ndim < rank for arg, one in pairs)
    first = sources[0]
    per_row = name in ("getitem", "linear", *GROUPED)
    return per_row and first is not None and first.holds == "rows"


def _unless_undone(node: fx.Node, source: Ordered) -> Ordered | None:
    """Where an op is not known, rows are taken to be in order as long as there are as many."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or not value.ndim:
        return None
    same = str(value.shape[0]) == str(source.key.meta["val"].shape[0])
    return Ordered(source.sort, "unknown") if same else None
