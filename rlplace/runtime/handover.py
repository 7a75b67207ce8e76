"""What crosses each border, where a value in an order of all rows of a rank does too.

The ranks of the next stage may have other rows. Such rows are then put back into the order of the
samples, cross as any tensor does, and are put into the order that the next stage's ranks give to
theirs: they get what was sorted, and sort it again. What follows from it alone they work out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import fx

from rlplace.errors import InputError
from rlplace.graph.program import Piece, Program, extract
from rlplace.graph.sharding.nodes import tensor_args
from rlplace.graph.types import OpGraph
from rlplace.plan.types import Plan, Stage
from rlplace.runtime.boundary import borders, stage_of
from rlplace.runtime.ordered import Ordered, ordered
from rlplace.runtime.pieces import without_integer_histograms

aten = torch.ops.aten


@dataclass(frozen=True)
class Sorting:
    """Values of one sort at a border, between ranks that have other rows.

    Args:
        key: What was sorted.
        order: The places of the sorted rows.
        rows: Values that cross in the order of the samples.
        numbers: Values that do not cross: the later stage works them out.
        steps: All that `order` and `numbers` follow from, from the sort on.
    """

    key: str
    order: str
    rows: tuple[str, ...]
    numbers: tuple[str, ...]
    steps: tuple[str, ...]

    def undone(self, program: Program, device: str) -> Piece:
        """From what was sorted and rows in its order to rows in the order of the samples."""
        return _moved(self._extracted(program, (), device), self.rows, undo=True)

    def done(self, program: Program, device: str) -> Piece:
        """From what was sorted and rows in the order of the samples to all that the stage reads."""
        return _moved(self._extracted(program, self.numbers, device), self.rows, undo=False)

    def _extracted(self, program: Program, numbers: Sequence[str], device: str) -> Piece:
        piece = extract(program, self.steps, [self.order, *numbers], device)
        return without_integer_histograms(piece) if device == "cpu" else piece


@dataclass(frozen=True)
class Handover:
    """What crosses a border.

    Args:
        nodes: Of the program.
        sortings: Values in the order of a sort, where the ranks of the later stage have other rows.
    """

    nodes: tuple[fx.Node, ...]
    sortings: tuple[Sorting, ...] = ()

    @property
    def names(self) -> dict[str, str]:
        """Under which name each node crosses."""
        rows = {name for sorting in self.sortings for name in sorting.rows}
        return {n.name: _by_sample(n.name) if n.name in rows else n.name for n in self.nodes}

    @property
    def tensors(self) -> dict[str, str]:
        """`names` of tensors; sizes are worked out on both sides."""
        tensors = {n.name for n in self.nodes if isinstance(n.meta["val"], torch.Tensor)}
        return {name: crossed for name, crossed in self.names.items() if name in tensors}


def handovers(program: Program, graph: OpGraph, plan: Plan) -> list[Handover]:
    """What crosses each border.

    Raises:
        InputError: If a value in an order of rows cannot be put back.
    """
    owners, count = stage_of(graph, plan), len(plan.stages)
    places = {node.name: place for place, node in enumerate(program.nodes)}
    crossing = [{n.name: n for n in nodes} for nodes in borders(program, owners, count)]
    sortings: list[list[Sorting]] = [[] for _ in crossing]
    marks = ordered(program)
    for index, (earlier, later) in enumerate(pairwise(plan.stages)):
        names = [name for name in crossing[index] if name in marks]
        if not names or not _unlike(earlier, later):
            continue
        sortings[index] = _sortings(program, marks, names, index)
        for name in names:
            if marks[name].alone:
                del crossing[index][name]
        for node in _needed(program, sortings[index]):
            for border in range(owners.get(node.name, count), index + 1):
                crossing[border][node.name] = node
    return [
        Handover(tuple(sorted(names.values(), key=lambda n: places[n.name])), tuple(own))
        for names, own in zip(crossing, sortings, strict=True)
    ]


def _unlike(earlier: Stage, later: Stage) -> bool:
    """Whether the ranks of two stages have other rows."""
    one, other = (
        (stage.mesh.dp, stage.mesh.cp, stage.mesh.tp, stage.shares) for stage in (earlier, later)
    )
    return one != other


def _sortings(
    program: Program, marks: Mapping[str, Ordered], names: Sequence[str], border: int
) -> list[Sorting]:
    found = []
    for sort in dict.fromkeys(marks[name].sort for name in names):
        own = [name for name in names if marks[name].sort is sort]
        order = next((n for n, mark in marks.items() if mark.sort is sort and mark.exact), None)
        unknown = [name for name in own if marks[name].holds == "unknown"]
        if unknown or order is None:
            rule = (
                f"{(unknown or own)[0]} is in an order of all tokens of a rank that cannot be "
                f"undone between stages {border} and {border + 1}, whose ranks have other tokens"
            )
            near = "the same degrees and shares on both"
            raise InputError("plan.stages", border, rule, near)
        rows = tuple(name for name in own if marks[name].holds == "rows")
        numbers = tuple(name for name in own if marks[name].alone and name != order)
        steps = _steps(program, marks[order].key, {order, *numbers})
        found.append(Sorting(marks[order].key.name, order, rows, numbers, steps))
    return found


def _steps(program: Program, key: fx.Node, wanted: set[str]) -> tuple[str, ...]:
    """What some values that follow from the key alone follow from, in order."""
    needed, found = set(wanted), []
    for node in reversed(program.nodes):
        if node.name in needed and node is not key:
            found.append(node.name)
            needed |= {source.name for source in tensor_args(node)}
    return tuple(reversed(found))


def _needed(program: Program, sortings: Sequence[Sorting]) -> list[fx.Node]:
    """What the later stage needs to sort again: what was sorted, and sizes."""
    names = {n for s in sortings for n in extract(program, s.steps, [s.order]).reads}
    return [node for node in program.body() if node.name in names]


def _moved(piece: Piece, rows: Sequence[str], undo: bool) -> Piece:
    """A piece that gives an order, with rows that are put into it, or back out of it.

    Args:
        piece: Its first result is the order.
        rows: The values of the program that have the rows.
        undo: From the order to that of the samples; then the piece gives nothing else.
    """
    graph = piece.module.graph
    output = graph.output_node()
    results: Any = output.args[0]
    order, *others = results
    sources: list[fx.Node] = []
    with graph.inserting_after([n for n in graph.nodes if n.op == "placeholder"][-1]):
        for name in reversed(rows):
            sources.insert(0, graph.placeholder(f"rows_of_{name}"))
    with graph.inserting_before(output):
        places = graph.call_function(aten.argsort.default, (order,)) if undo else order
        moved = [graph.call_function(aten.index.Tensor, (own, [places])) for own in sources]
    output.args = (tuple(moved) if undo else (order, *others, *moved),)
    piece.module.recompile()
    crossed = tuple(_by_sample(name) for name in rows)
    if undo:
        return replace(piece, reads=(*piece.reads, *rows), writes=crossed)
    return replace(piece, reads=(*piece.reads, *crossed), writes=(*piece.writes, *rows))


def both_names(name: str) -> tuple[str, str]:
    """Of a value with rows: in the order of a sort, and in that of the samples."""
    return name, _by_sample(name)


def _by_sample(name: str) -> str:
    return f"{name} by sample"
