"""From a plan to the module of one stage: the groups of the exported program, run in order."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx, nn
from torch.utils.checkpoint import checkpoint

from rlplace.errors import InputError
from rlplace.graph.program import Piece, Program, extract, prologue_of
from rlplace.graph.sharding.axis import Axis, use_axis
from rlplace.graph.types import OpGraph, Placement, Replicate
from rlplace.plan.types import Plan
from rlplace.runtime.boundary import borders, needs_gradient, numbers, stage_of
from rlplace.runtime.local import LocalStates, localized

Values = dict[str, Any]


@dataclass(frozen=True)
class Part:
    """A piece with the tensors that it runs on.

    Args:
        piece: The nodes of one group, or the prologue.
        states: Parameters, buffers and constants, in the order of `Piece.states`.
        recompute: Run the forward again in the backward pass instead of keeping what it saves.
        written: Positions of `states` that the piece writes into (running statistics).
        drop: Values that nothing reads after this part.
        axis: The tp axis of its collectives.
    """

    piece: Piece
    states: tuple[torch.Tensor, ...]
    recompute: bool = False
    written: tuple[int, ...] = ()
    drop: tuple[str, ...] = ()
    axis: Axis | None = None

    def __call__(self, values: Values, hold: Callable[[torch.Tensor], object]) -> None:
        """Run on the values of a micro-batch and add what the piece makes.

        Args:
            values: User inputs and tensors by name; changed in place.
            hold: Called with every tensor that recompute keeps.
        """
        names = (*self.piece.inputs, *self.piece.reads)
        arguments = [values[name] for name in names]
        if self.recompute and torch.is_grad_enabled():
            kept = [hold(value) for value in arguments if isinstance(value, torch.Tensor)]
            results = checkpoint(self._twice(kept), *arguments, use_reentrant=False)
        else:
            results = self._run(self.states, arguments)
        for name in self.drop:
            values.pop(name, None)
        values.update(zip(self.piece.writes, results, strict=True))

    def _twice(self, kept: list[object]) -> Callable[..., Any]:
        """The piece as a function whose second run leaves the running statistics alone."""
        runs = 0

        def run(*arguments: Any) -> Any:
            nonlocal runs
            states = list(self.states)
            if runs:
                kept.clear()
                for position in self.written:
                    states[position] = states[position].clone()
            runs += 1
            return self._run(states, arguments)

        return run

    def _run(self, states: Sequence[torch.Tensor], arguments: Sequence[Any]) -> Any:
        if self.axis is None:
            return self.piece.module(*states, *arguments)
        with use_axis(self.axis):
            return self.piece.module(*states, *arguments)


class StageModule(nn.Module):
    """One stage of a plan.

    Its parameters and buffers have the fully qualified names that they have in the user's module,
    so that state dicts of all stages together are the state dict of the module.

    Args:
        parts: The prologue first, then the groups in order.
        sizes: Numbers that earlier stages work out, at this stage's batch.
        gives: Tensors that the next stage reads or relays, or the loss.
    """

    def __init__(
        self, parts: Sequence[Part], sizes: Mapping[str, int], gives: Sequence[str]
    ) -> None:
        super().__init__()
        self._parts = tuple(parts)
        self._sizes = dict(sizes)
        self._gives = tuple(gives)
        self.hold: Callable[[torch.Tensor], object] = hold_nothing
        for part in parts:
            for (_, name), tensor in zip(part.piece.states, part.states, strict=True):
                _attach(self, name, tensor)

    def forward(self, inputs: Values, received: Values) -> Values:
        """Run a micro-batch.

        Args:
            inputs: The user's tensors by placeholder, this replica's samples.
            received: What the stage before gave.

        Returns:
            The tensors of `gives`.
        """
        values = {**self._sizes, **inputs, **received}
        for part in self._parts:
            part(values, self.hold)
        return {name: values[name] for name in self._gives}


def hold_nothing(tensor: torch.Tensor) -> None:
    """What `StageModule.hold` is while nobody counts memory."""


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


def protected(piece: Piece) -> Piece:
    """A piece that copies what it reads before it writes into it.

    Between groups a tensor may be a leaf of autograd, or be read again by a recompute.
    """
    graph = piece.module.graph
    outer = set(piece.reads) | set(piece.inputs)
    for name in sorted({found for node in graph.nodes for found in written_by(node)} & outer):
        source = next(node for node in graph.nodes if node.name == name)
        body = next(node for node in graph.nodes if node.op != "placeholder")
        with graph.inserting_before(body):
            copy = graph.call_function(torch.ops.aten.clone.default, (source,))
            copy.meta = dict(source.meta)
        source.replace_all_uses_with(copy, delete_user_cb=lambda user, own=copy: user is not own)
    piece.module.recompile()
    return piece


def without_integer_histograms(piece: Piece) -> Piece:
    """A piece whose histograms count floats, as a CPU wants it.

    The mixture of experts of transformers branches on the device, and a program has the branch of
    a GPU, which counts integers.
    """
    graph = piece.module.graph
    for node in graph.nodes:
        if node.target is torch.ops.aten.histc.default:
            (source,) = node.all_input_nodes
            with graph.inserting_before(node):
                floats = graph.call_function(torch.ops.aten.to.dtype, (source, torch.float32))
            floats.meta["val"] = source.meta["val"].to(torch.float32)
            node.replace_input_with(source, floats)
    piece.module.recompile()
    return piece


def written_by(node: fx.Node) -> list[str]:
    """Placeholders whose storage a node writes into."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return []
    schema = node.target._schema
    found = []
    for position, argument in enumerate(schema.arguments):
        info = argument.alias_info
        if info is not None and info.is_write and position < len(node.args):
            found.append(node.args[position])
    if node.target is torch.ops.aten.batch_norm.default:
        found += node.args[3:5]
    return [_base(value).name for value in found if isinstance(value, fx.Node)]


def _base(node: fx.Node) -> fx.Node:
    """The node whose storage a chain of views shows."""
    while isinstance(node.target, torch._ops.OpOverload) and node.target._schema.arguments:
        info = node.target._schema.arguments[0].alias_info
        if info is None or not isinstance(node.args[0], fx.Node):
            break
        node = node.args[0]
    return node


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


def _attach(root: nn.Module, name: str, tensor: torch.Tensor) -> None:
    """Register a tensor under a dotted name."""
    *path, last = name.split(".")
    module = root
    for step in path:
        if not isinstance(getattr(module, step, None), nn.Module):
            module.add_module(step, nn.Module())
        module = module.get_submodule(step)
    if isinstance(tensor, nn.Parameter):
        module.register_parameter(last, tensor)
    elif last not in module._buffers:
        module.register_buffer(last, tensor)
