"""Layouts of all groups of a model that fit each other: what one hands on, the next reads so.

Pure functions of a graph: nothing here searches, the layouts are those that capture found.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Literal

from rlplace.errors import InputError
from rlplace.graph.types import Edge, Layout, OpGraph, Replicate, Structure

#: Names of the layouts that cut sequences between groups, by axis.
CUT_SEQUENCES: dict[Literal["tp", "cp"], str] = {"tp": "sequence", "cp": "context"}


def sequence_layouts(graph: OpGraph, degree: int) -> tuple[Layout, ...]:
    """A layout for each group with which sequences stay cut over tp from end to end.

    Megatron's sequence parallelism (Korthikanti et al., arXiv 2205.05198). Groups whose sequences
    are never cut (they read and write none) run sharded, or whole where they cannot be.

    Args:
        graph: Captured with layouts at this degree.
        degree: Size of the tp axis; 1 gives ``replicate`` everywhere.

    Raises:
        InputError: If the degree is not legal for the model (`OpGraph.tp_degrees`), if a group
            has sequences and no layout that cuts them at this degree, or if one reads a tensor
            in another way than it is handed on.
    """
    refusal = graph.tp_refusal(degree)
    if refusal is not None:
        legal = max(graph.tp_degrees(degree))
        raise InputError("tp", degree, refusal.removeprefix(f"tp={degree} "), legal)
    return _layouts(graph, "tp", degree)


def context_layouts(graph: OpGraph, degree: int) -> tuple[Layout, ...]:
    """As `sequence_layouts`, on the cp axis: sequences are cut, parameters are whole."""
    return _layouts(graph, "cp", degree)


def disagreement(graph: OpGraph, layouts: Mapping[int, Layout]) -> Edge | None:
    """The first edge whose tensor is read in another way than it is handed on; None if all fit.

    Args:
        graph: The model.
        layouts: By group, on one axis and of one degree; edges to groups without one do not count.
    """
    read: Counter[int] = Counter()
    for edge in graph.edges:
        place = read[edge.dst]
        read[edge.dst] += 1
        if edge.src not in layouts or edge.dst not in layouts:
            continue
        reads, writes = layouts[edge.dst].reads, layouts[edge.src].writes
        taken = reads[place] if reads else Replicate()
        names = graph.groups[edge.src].writes
        if taken != (writes[names.index(edge.tensor)] if writes else Replicate()):
            return edge
    return None


def _layouts(graph: OpGraph, axis: Literal["tp", "cp"], degree: int) -> tuple[Layout, ...]:
    by_structure = {
        group.structure: _layout(graph, group.index, axis, degree) for group in graph.groups
    }
    chosen = tuple(by_structure[group.structure] for group in graph.groups)
    edge = disagreement(graph, dict(enumerate(chosen)))
    if edge is not None:
        maker, reader = graph.groups[edge.src].name, graph.groups[edge.dst].name
        rule = f"{reader} does not read {edge.tensor} as {maker} hands it on"
        raise InputError(axis, degree, rule, 1)
    return chosen


def _layout(graph: OpGraph, group: int, axis: Literal["tp", "cp"], degree: int) -> Layout:
    """The layout of a group that cuts its sequences; a whole one if none does at any degree."""
    structure, name = graph.structure(group), CUT_SEQUENCES[axis]
    if degree == 1:
        return Layout("replicate", 1, structure.work, axis=axis)
    cutting = {lay.degree: lay for lay in structure.bordered if lay.name == name}
    if degree in cutting:
        return cutting[degree]
    if cutting:
        rule = f"{graph.groups[group].name} has sequences that {axis} cannot cut so"
        raise InputError(axis, degree, rule, min(cutting, key=lambda d: abs(d - degree)))
    return _whole(structure, axis, degree)


def _whole(structure: Structure, axis: Literal["tp", "cp"], degree: int) -> Layout:
    sharded = structure.layouts_at(degree)[1:] if axis == "tp" else ()
    return next(iter(sharded), Layout("replicate", degree, structure.work, axis=axis))
