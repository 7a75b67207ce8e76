"""From a plan to the module of one stage: the groups of the exported program, run in order."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import torch

from rlplace.errors import InputError
from rlplace.graph.program import Piece, Program, extract, prologue_of
from rlplace.graph.sharding.axis import Axis
from rlplace.graph.types import OpGraph, Placement, Replicate
from rlplace.plan.types import Plan
from rlplace.runtime.boundary import borders, needs_gradient, numbers, stage_of
from rlplace.runtime.local import LocalStates, localized
from rlplace.runtime.parts import Part, StageModule
from rlplace.runtime.pieces import protected, without_integer_histograms, written_by


def match(program: Program, graph: OpGraph) -> None:
    """Refuse a graph that is not of this program.

    Raises:
        InputError: If the groups do not hold exactly the program's ops.
    """
    placed = [op for group in graph.groups for op in group.ops]
    present = {node.name for node in program.body()}
    unknown = [op for op in placed if op not in present]
    if unknown:
        rule = f"op {unknown[0]} of graph {graph.name} is not in the model that model_fn made"
        raise InputError("plan.graph", graph.fingerprint, rule)
    missing = present - set(placed)
    if missing:
        rule = f"op {sorted(missing)[0]} of the model is in no group of graph {graph.name}"
        raise InputError("plan.graph", graph.fingerprint, rule)


def split(
    program: Program,
    graph: OpGraph,
    plan: Plan,
    index: int,
    states: LocalStates,
    device: str = "cpu",
    axis: Axis | None = None,
) -> StageModule:
    """The module of stage `index`.

    Args:
        program: The exported model.
        graph: Its groups.
        plan: The plan.
        index: Which stage.
        states: Parameters, buffers and constants of this rank.
        device: Where the stage runs.
        axis: The tp axis of its mesh, where that has more than one device.
    """
    stage = plan.stages[index]
    crossing = borders(program, stage_of(graph, plan), len(plan.stages))
    arriving = crossing[index - 1] if index else []
    samples = plan.micro_batch // stage.mesh.dp
    gives = (
        [node.name for node in crossing[index] if isinstance(node.meta["val"], torch.Tensor)]
        if index + 1 < len(plan.stages)
        else [program.outputs[0]]
    )
    grads = needs_gradient(program)
    parts = []
    for group, choice in zip(graph.groups[stage.start : stage.stop], stage.choices, strict=True):
        piece = protected(extract(program, group.ops, device=device))
        if device == "cpu":
            piece = without_integer_histograms(piece)
        legal = graph.structure(group.index).layouts_at(stage.mesh.tp)
        layout = next(layout for layout in legal if layout.name == choice.layout)
        local, placements = localized(piece, layout, grads)
        parts.append(_part(piece, local, placements, states, choice.recompute == "full", axis))
    prologue = _prologue(program, [part.piece for part in parts], device)
    if prologue is not None:
        parts.insert(0, _part(prologue, prologue, {}, states))
    sizes = {name: size(samples) for name, size in numbers(arriving).items()}
    return StageModule(_dropping(parts, gives), sizes, gives)


def _part(
    piece: Piece,
    local: Piece,
    placements: Mapping[str, Placement],
    states: LocalStates,
    recompute: bool = False,
    axis: Axis | None = None,
) -> Part:
    """What runs `local`, which is `piece` as one rank of the tp axis runs it."""
    written = {name for node in piece.module.graph.nodes for name in written_by(node)}
    positions = tuple(i for i, (name, _) in enumerate(piece.states) if name in written)
    tensors = tuple(states.get(n, placements.get(n, Replicate())) for _, n in piece.states)
    return Part(local, tensors, recompute, positions, axis=axis)


def _prologue(program: Program, pieces: Iterable[Piece], device: str) -> Piece | None:
    """What the pieces need of masks, positions and shapes, as one piece."""
    needed = {name for piece in pieces for name in piece.reads} & program.prologue
    nodes = prologue_of(program, needed)
    return extract(program, nodes, sorted(needed), device) if nodes else None


def _dropping(parts: Sequence[Part], gives: Sequence[str]) -> list[Part]:
    """The parts, each with the values that no later one reads."""
    later = set(gives)
    result: list[Part] = []
    for part in reversed(parts):
        names = set(part.piece.inputs) | set(part.piece.reads)
        drop = tuple(sorted(names - later))
        result.append(replace(part, drop=drop))
        later |= names
    return result[::-1]
