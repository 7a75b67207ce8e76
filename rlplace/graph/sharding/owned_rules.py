"""Rows that a device puts into an order of its own: sorted by expert, sent to it, and back.

Where rows are cut over the devices, each device may sort its own. What it then holds is no `Shard`
of the sorted whole, but as good as one for ops on single rows, until the very order is undone.
So the order is part of the placement (`Owned`), and every other use is refused. The number of rows
of each expert is another one on each device (`PerDevice`); a grouped matmul whose matrices are cut
between experts sends each row to the device of its expert, and back (Lepikhin et al., 2021).

Rules of single ops, as in `sharding.rules`; they hold for rows cut with a `Shard.run`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from torch import fx

from rlplace.graph.sharding.expert_rules import EXPERTS, GROUPED, Internal, Routed, length_is_read
from rlplace.graph.sharding.labels import Signature
from rlplace.graph.sharding.nodes import (
    RESHAPES,
    SPLITS,
    argument,
    op_name,
    shape,
    split_parts,
    tensor_args,
    written_args,
)
from rlplace.graph.sharding.signatures import ELEMENTWISE, SIGNATURES
from rlplace.graph.sharding.strategy import Copied, Strategy, Want
from rlplace.graph.types import Shard


@dataclass(frozen=True, slots=True)
class Owned(Internal):
    """A device holds what belongs to its own rows, in an order of its own.

    Args:
        order: Name of the sort that made the order. `run` is that of the rows it sorted.
        holds: ``rows`` (values of the sorted rows), ``sorted`` (the two results of a sort),
            ``places`` (where each sorted row was: numbers of the device's own rows), or
            ``inverse`` (what puts the rows back).
        points: Of places: the run of the rows that they number.
    """

    order: str = ""
    holds: Literal["rows", "sorted", "places", "inverse"] = "rows"
    points: int = 0


@dataclass(frozen=True, slots=True)
class PerDevice(Internal):
    """How many rows of each expert a device has, or where they end; `run` as in `Owned`.

    Args:
        order: Name of the sort that made the order of the rows.
        holds: Which of the two.
    """

    order: str = ""
    holds: Literal["counts", "ends"] = "counts"


Reachable = Mapping[fx.Node, Collection[Shard]]


def owned_strategies(node: fx.Node, degree: int, reachable: Reachable) -> list[Strategy]:
    """The ways to run a node on rows in the device's own order; none where there is no such row.

    Args:
        node: A call of a function.
        degree: Size of the axis.
        reachable: The shardings that each argument can have.
    """
    if written_args(node):
        return []
    name = op_name(node)
    if name in _RULES:
        return _RULES[name](node, degree, reachable)
    return _on_rows(node, reachable) if name in ELEMENTWISE else []


def sent_values(node: fx.Node, strategy: Strategy) -> list[fx.Node]:
    """Of a grouped matmul, the rows that go to other devices before it and after it."""
    ends = strategy.reads[-1] if strategy.reads else None
    if op_name(node) not in GROUPED or not isinstance(ends, PerDevice):
        return []
    there = [tensor_args(node)[0]] * isinstance(strategy.reads[0], Owned)
    return there + [node] * isinstance(strategy.output, Owned)


def _cut_rows(value: fx.Node, reachable: Reachable) -> list[Shard]:
    shards = reachable.get(value, ())
    return [s for s in shards if not isinstance(s, Internal) and s.dim == 0 and s.run]


def _owned(value: fx.Node, reachable: Reachable, *holds: str) -> list[Owned]:
    return [s for s in reachable.get(value, ()) if isinstance(s, Owned) and s.holds in holds]


def _sort(node: fx.Node, degree: int, reachable: Reachable) -> list[Strategy]:
    """Own rows, sorted; or, by the places of another sort, what undoes it."""
    (keys,) = tensor_args(node)
    if len(shape(keys)) != 1 or argument(node, 2, "descending", False):
        return []
    pair = op_name(node) == "sort"
    found = []
    for cut in _cut_rows(keys, reachable):
        made = Owned(0, run=cut.run, order=node.name, holds="sorted")
        found.append(
            Strategy((cut,), made if pair else replace(made, holds="places", points=cut.run))
        )
    if not pair:
        found += [
            Strategy((places,), replace(places, holds="inverse", points=0))
            for places in _owned(keys, reachable, "places")
            if places.points == places.run
        ]
    return found


def _getitem(node: fx.Node, degree: int, reachable: Reachable) -> list[Strategy]:
    (source,) = tensor_args(node)
    found = [Strategy((rows,), rows) for rows in _owned(source, reachable, "rows")]
    for held in _owned(source, reachable, "sorted"):
        values = replace(held, holds="rows")
        places = replace(held, holds="places", points=held.run)
        found.append(Strategy((held,), places if node.args[1] else values))
    return found


def _divided(node: fx.Node, degree: int, reachable: Reachable) -> list[Strategy]:
    """Places of rows that are `by` for each token become places of tokens."""
    args, by = tensor_args(node), node.args[1]
    if isinstance(by, int) and by > 0 and len(args) == 1:
        for places in _owned(args[0], reachable, "places"):
            if places.points % (by * degree) == 0:
                return [Strategy((places,), replace(places, points=places.points // by))]
    return _on_rows(node, reachable)


def _index(node: fx.Node, degree: int, reachable: Reachable) -> list[Strategy]:
    """Own rows taken by places in them, or put back by the inverse of their very order."""
    indices = argument(node, 1, "indices")
    if len(indices) != 1 or len(tensor_args(node)) != 2:
        return []
    source, places = tensor_args(node)
    found = [
        Strategy((rows, at), Owned(0, run=at.run, order=at.order))
        for at in _owned(places, reachable, "places")
        for rows in _cut_rows(source, reachable)
        if rows == Shard(0, run=at.points)
    ]
    found += [
        Strategy((rows, inverse), Shard(0, run=rows.run))
        for inverse in _owned(places, reachable, "inverse")
        for rows in _owned(source, reachable, "rows")
        if (rows.order, rows.run) == (inverse.order, inverse.run)
    ]
    return found


def _on_rows(node: fx.Node, reachable: Reachable) -> list[Strategy]:
    """Elementwise ops; what is not owned has no rows."""
    name, args = op_name(node), tensor_args(node)
    signature: Signature | None = SIGNATURES[name](node) if name in ELEMENTWISE else None
    rank = len(shape(node)) if signature else 0
    kinds = {rows for arg in args for rows in _owned(arg, reachable, "rows")}
    found = []
    for rows in sorted(kinds, key=lambda rows: rows.order):
        own = [rows in reachable.get(arg, ()) for arg in args]
        ranks = [len(shape(arg)) for arg in args]
        fits = all((r == rank) if mine else (r < rank) for r, mine in zip(ranks, own, strict=True))
        if fits and rank:
            reads: Sequence[Want] = [rows if mine else Copied() for mine in own]
            found.append(Strategy(tuple(reads), rows))
    return found


def _convert(node: fx.Node, degree: int, reachable: Reachable) -> list[Strategy]:
    """A cast: of rows, or of the numbers of them."""
    held = reachable.get(tensor_args(node)[0], ())
    counts = [Strategy((each,), each) for each in held if isinstance(each, PerDevice)]
    return counts or _on_rows(node, reachable)


def _split(node: fx.Node, degree: int, reachable: Reachable) -> list[Strategy]:
    rows = _owned(tensor_args(node)[0], reachable, "rows")
    return [Strategy((each,), each) for each in rows] if split_parts(node)[0] != 0 else []


def _reshape(node: fx.Node, degree: int, reachable: Reachable) -> list[Strategy]:
    """A new dim behind the rows, or other dims of a row."""
    source = tensor_args(node)[0]
    rows = _owned(source, reachable, "rows")
    sizes = argument(node, 1, "size")
    if op_name(node) == "unsqueeze":
        keeps = argument(node, 1, "dim") % len(shape(node)) != 0
    else:
        first = sizes[0] if isinstance(sizes, list | tuple) and sizes else None
        keeps = isinstance(first, int) and first == -1
        keeps = keeps and bool(source.meta["val"].shape[0] == node.meta["val"].shape[0])
    return [Strategy((each,), each) for each in rows] if keeps else []


def _histogram(node: fx.Node, degree: int, reachable: Reachable) -> list[Strategy]:
    """Rows of each expert. Each row has to be counted: experts are numbers below the bins."""
    keys = tensor_args(node)[0]
    bins = argument(node, 1, "bins", 100)
    whole = (argument(node, 2, "min", 0), argument(node, 3, "max", 0)) == (0, bins - 1)
    order, limit = _sorted_keys(keys)
    return [
        Strategy((rows,), PerDevice(0, run=rows.run, order=rows.order))
        for rows in _owned(keys, reachable, "rows")
        if whole and rows.order == order and limit and limit <= bins
    ]


def _sorted_keys(value: fx.Node) -> tuple[str, int]:
    """The sort that made the values of a node, and what they are below; 0 if that is not known."""
    while op_name(value) in _CASTS:
        value = tensor_args(value)[0]
    args = tensor_args(value)
    if op_name(value) == "getitem" and op_name(args[0]) == "sort" and value.args[1] == 0:
        sort = args[0]
    elif op_name(value) == "index" and len(args) == 2 and op_name(args[1]) == "argsort":
        sort = args[1]
        if tensor_args(sort)[0] is not args[0]:
            return "", 0
    else:
        return "", 0
    return sort.name, _limit(tensor_args(sort)[0])


def _limit(value: fx.Node) -> int:
    """What whole numbers are below, where they are indices of a top-k."""
    while op_name(value) in _CASTS | RESHAPES:
        value = tensor_args(value)[0]
    if op_name(value) != "getitem" or value.args[1] != 1:
        return 0
    (source,) = tensor_args(value)
    if op_name(source) != "topk":
        return 0
    sizes, dim = shape(tensor_args(source)[0]), int(argument(source, 2, "dim", -1))
    return sizes[dim]


def _cumsum(node: fx.Node, degree: int, reachable: Reachable) -> list[Strategy]:
    held = reachable.get(tensor_args(node)[0], ())
    counts = [each for each in held if isinstance(each, PerDevice) and each.holds == "counts"]
    return [Strategy((each,), replace(each, holds="ends")) for each in counts]


def _grouped(node: fx.Node, degree: int, reachable: Reachable) -> list[Strategy]:
    """Rows go to the devices of their experts, or are there already; results return, or stay."""
    args = tensor_args(node)
    if node.kwargs or len(node.args) > 3 or [len(shape(arg)) for arg in args] != [2, 3, 1]:
        return []
    rows, matrices, ends = args
    if set(reachable.get(matrices, ())) != {EXPERTS} or shape(matrices)[0] != shape(ends)[0]:
        return []
    routed = Routed(0, ends=ends.name)
    found = []
    for end in reachable.get(ends, ()):
        if isinstance(end, PerDevice) and end.holds == "ends":
            own = Owned(0, run=end.run, order=end.order)
            reads = [each for each in (own, routed) if each in reachable.get(rows, ())]
            made = [own] if length_is_read(node) else [routed, own]
            found += [Strategy((read, EXPERTS, end), out) for read in reads for out in made]
    return found


_CASTS = frozenset({"to", "_to_copy"})

_RULES: Mapping[str, Callable[[fx.Node, int, Reachable], list[Strategy]]] = {
    **dict.fromkeys(GROUPED, _grouped),
    **dict.fromkeys(SPLITS, _split),
    **dict.fromkeys(("index", "_unsafe_index"), _index),
    **dict.fromkeys(("sort", "argsort"), _sort),
    **dict.fromkeys(("unsqueeze", "view", "reshape", "_unsafe_view"), _reshape),
    **dict.fromkeys(_CASTS, _convert),
    "cumsum": _cumsum,
    "floor_divide": _divided,
    "getitem": _getitem,
    "histc": _histogram,
}
