"""Every layout of a graph as a case that ranks can run: one group of each structure, in fp64.

The groups run one after the other on the CPU, as a run on one device does, and the first group of
each structure is kept with the values that it got. In fp64 a wrong sum cannot hide in rounding.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from rlplace.errors import InputError
from rlplace.graph.layouts import borders_of, placements_of, solve
from rlplace.graph.program import Piece, Program, export_program, extract, prologue_of
from rlplace.graph.sharding.borders import WHOLE
from rlplace.graph.sharding.lower import Assignment
from rlplace.graph.types import Layout, OpGraph, Placement, Shard
from rlplace.runtime.boundary import needs_gradient
from rlplace.runtime.pieces import protected, without_integer_histograms
from rlplace.runtime.shard_check import Case
from rlplace.runtime.split import match


@dataclass(frozen=True)
class Subject:
    """A group that can be run, the first of its structure.

    Args:
        group: Its index in the graph.
        piece: Its ops, in fp64 on the CPU.
        inputs: What it got in a forward pass; those that a gradient flows to require one.
        grads: Placeholders that a gradient flows back to.
        activations: Reads that other groups make.
    """

    group: int
    piece: Piece
    inputs: tuple[Any, ...]
    grads: frozenset[str]
    activations: tuple[str, ...]


def subjects_of(module: nn.Module, kwargs: Mapping[str, Any], graph: OpGraph) -> list[Subject]:
    """One group of each structure of a graph, with the values of a forward pass.

    Args:
        module: What the graph was captured from, on the CPU; it is left as it is.
        kwargs: Keyword inputs, on the CPU.
        graph: Its graph.

    Raises:
        InputError: If the graph is not of this module.
    """
    program = export_program(module, (), kwargs)
    match(program, graph)
    pieces = [_piece(program, group.ops) for group in graph.groups]
    grads = needs_gradient(program)
    values = _given(program, module, kwargs)
    first: dict[int, Subject] = {}
    with fp64(), torch.no_grad():
        values |= _prologue(program, pieces, values)
        for group, piece in zip(graph.groups, pieces, strict=True):
            names = [*(place for place, _ in piece.states), *piece.inputs, *piece.reads]
            if group.structure not in first:
                own = frozenset(name for name in names if name in grads and _floats(values[name]))
                given = tuple(_leaf(values[name], name in own) for name in names)
                made = tuple(name for name in piece.reads if name not in program.prologue)
                first[group.structure] = Subject(group.index, piece, given, own, made)
            results = piece.module(*(values[name] for name in names))
            values.update(zip(piece.writes, results, strict=True))
    return list(first.values())


def case_of(subject: Subject, layout: Layout, name: str) -> Case:
    """A layout of the subject's structure as a case.

    The assignment is found again from the placements of the layout, as a run does it.

    Raises:
        InputError: If the ops do not have the layout.
    """
    assignment = _assignment(subject, layout)
    found = None if assignment is None else _placements(subject, assignment)
    if assignment is None or found != (layout.params, layout.reads, layout.writes):
        rule = f"the ops {subject.piece.writes} give {found or 'no layout'}"
        raise InputError("layout", (layout.params, layout.reads, layout.writes), rule)
    return Case(name, subject.piece, assignment, subject.inputs)


def params_held(case: Case) -> int:
    """Trainable elements that one device holds."""
    held: dict[str, int] = {}
    for (place, name), value in zip(case.piece.states, case.inputs, strict=False):
        if value.requires_grad:
            shares = case.assignment.degree if isinstance(_at(case, place), Shard) else 1
            held[name] = value.numel() // shares
    return sum(held.values())


@contextmanager
def fp64() -> Iterator[None]:
    """What is made without a dtype is made in fp64."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _at(case: Case, place: str) -> Placement:
    return case.assignment.held(place)


def _assignment(subject: Subject, layout: Layout) -> Assignment | None:
    piece = subject.piece
    names = dict.fromkeys(name for _, name in piece.states)
    pinned = dict(zip(names, layout.params, strict=True))
    borders = borders_of(piece, subject.activations, layout.degree)
    border = borders.get(layout.name, WHOLE)
    return solve(piece, layout.degree, subject.grads, pinned, border)


def _placements(subject: Subject, assignment: Assignment) -> tuple[tuple[Placement, ...], ...]:
    """Of states, activations read and written, as a `Layout` has them."""
    reads = tuple(assignment.held(name) for name in subject.activations)
    states = tuple(placements_of(subject.piece, assignment).values())
    return states, reads if assignment.reads else (), assignment.writes


def _piece(program: Program, ops: Collection[str]) -> Piece:
    """Some ops as they run on the CPU, in fp64."""
    return _wide(without_integer_histograms(protected(extract(program, ops, device="cpu"))))


def _wide(piece: Piece) -> Piece:
    """A piece whose casts to a float dtype are casts to fp64."""

    def wide(argument: Any) -> Any:
        floats = isinstance(argument, torch.dtype) and argument.is_floating_point
        return torch.float64 if floats else argument

    for node in piece.module.graph.nodes:
        node.args = torch.utils._pytree.tree_map(wide, node.args)
        node.kwargs = torch.utils._pytree.tree_map(wide, node.kwargs)
    piece.module.recompile()
    return piece


def _given(program: Program, module: nn.Module, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """States and inputs of the program, floats in fp64."""
    tensors = {n: v for n, v in program.exported.constants.items() if isinstance(v, Tensor)}
    tensors |= {**dict(module.named_parameters()), **dict(module.named_buffers())}
    values = {place: _double(tensors[name]) for place, name in program.states.items()}
    inputs = program.unflatten((), dict(kwargs))
    return values | {n: _double(v) for n, v in zip(program.inputs, inputs, strict=True)}


def _prologue(
    program: Program, pieces: Sequence[Piece], values: Mapping[str, Any]
) -> dict[str, Any]:
    needed = {name for piece in pieces for name in piece.reads} & program.prologue
    nodes = prologue_of(program, needed)
    if not nodes:
        return {}
    piece = _wide(extract(program, nodes, sorted(needed), "cpu"))
    names = [*(place for place, _ in piece.states), *piece.inputs]
    return dict(zip(piece.writes, piece.module(*(values[n] for n in names)), strict=True))


def _double(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return value.detach().to(torch.float64 if _floats(value) else value.dtype, copy=True)


def _leaf(value: Any, needs_grad: bool) -> Any:
    return value.detach().clone().requires_grad_(needs_grad) if _is_tensor(value) else value


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor)


def _floats(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()
