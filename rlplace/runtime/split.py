"""From a plan to the module of one stage: the groups of the exported program, run in order."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from rlplace.errors import InputError
from rlplace.graph.program import Piece, Program, extract, prologue_of
from rlplace.graph.types import OpGraph, Replicate
from rlplace.plan.orders import split_actions
from rlplace.plan.schedules import actions
from rlplace.plan.types import Plan
from rlplace.runtime.aside import apart
from rlplace.runtime.axes import ALONE, Axes
from rlplace.runtime.boundary import AXES, WHOLE, Form, forms, layouts_of, needs_gradient, numbers
from rlplace.runtime.draws import Stream, draws
from rlplace.runtime.handover import Handover, Sorting, both_names, handovers
from rlplace.runtime.local import Localized, LocalStates, localized
from rlplace.runtime.loss_chunks import chunked
from rlplace.runtime.parts import Conversion, Part, StageModule, Step
from rlplace.runtime.pieces import protected, without_integer_histograms, written_by
from rlplace.runtime.recompute import prepared, regions
from rlplace.runtime.sliced import rows_of_slices, sliced
from rlplace.runtime.weight_slices import WeightSlice


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
    axes: Axes = ALONE,
) -> StageModule:
    """The module of stage `index`.

    Args:
        program: The exported model.
        graph: Its groups.
        plan: The plan.
        index: Which stage.
        states: Parameters, buffers and constants of this rank.
        device: Where the stage runs.
        axes: The axes of its mesh that cut activations.
    """
    stage, every = plan.stages[index], handovers(program, graph, plan)
    before = every[index - 1] if index else Handover(())
    after = every[index] if index + 1 < len(plan.stages) else None
    form = forms(graph, plan, [handover.nodes for handover in every])[index]
    names = before.names
    held = {names[n.name]: form.get(n.name, WHOLE) for n in before.nodes}
    values = HeldValues(axes, held)
    for sorting in before.sortings:
        _add_moved(values, sorting.done(program, device), sorting, form, states)
    grads = needs_gradient(program)
    by_cp, by_tp = (layouts_of(graph, stage, axis) for axis in AXES)
    leaving = {node.name for handover in every for node in handover.nodes}
    splits = any(at == index for at, _ in split_actions(actions(plan)))
    for group, choice in zip(graph.groups[stage.start : stage.stop], stage.choices, strict=True):
        piece = protected(_extracted(program, group.ops, leaving, device))
        if device == "cpu":
            piece = without_integer_histograms(piece)
        local = localized(piece, by_cp[group.index], by_tp[group.index], grads, program.prologue)
        if plan.loss_chunks > 1:
            local = replace(local, piece=chunked(local.piece, plan.loss_chunks))
        local = replace(local, piece=prepared(local.piece, choice.recompute))
        rows = rows_of_slices(group, choice, by_tp[group.index])
        pieces = sliced(local.piece, rows, choice.slices, group.index)
        for one in pieces if splits else ():
            apart(one, program.trainable)
        for own, part in _parts(piece, local, pieces, states, axes, group.index):
            values.add(own, part, choice.recompute)
    for sorting in after.sortings if after is not None else ():
        _add_moved(values, sorting.undone(program, device), sorting, form, states)
    gives = {program.outputs[0]: program.outputs[0]} if after is None else after.tensors
    last = {given: values.take(given, form.get(name, WHOLE)) for name, given in gives.items()}
    steps = values.steps
    prologue = _prologue(program, [step for step, _ in steps], device)
    if prologue is not None:
        steps = [(part_of(prologue, Localized(prologue, {}), states), "none"), *steps]
    return StageModule(regions(steps, set(last.values())), numbers(before.nodes), last)


def _extracted(
    program: Program, ops: Sequence[str], leaving: Collection[str], device: str
) -> Piece:
    """The piece of a group; it gives what crosses a border though no other group reads it, too."""
    piece = extract(program, ops, device=device)
    more = [op for op in ops if op in leaving and op not in piece.writes]
    return extract(program, ops, (*piece.writes, *more), device) if more else piece


def _parts(
    piece: Piece,
    local: Localized,
    pieces: Sequence[Piece],
    states: LocalStates,
    axes: Axes,
    group: int,
) -> Iterator[tuple[Localized, Part]]:
    """A part for each of the pieces that do what a group does; they draw one after the other."""
    stream = Stream() if len(pieces) > 1 else None
    for at, one in enumerate(pieces):
        own = replace(local, piece=one)
        part = part_of(piece, own, states, axes, group)
        yield own, replace(part, stream=stream, goes_on=at > 0)


def _add_moved(
    values: HeldValues,
    piece: Piece,
    sorting: Sorting,
    form: Mapping[str, Form],
    states: LocalStates,
) -> None:
    """Add what brings rows from one order into another; each row is held as it was."""
    held = {name: form.get(row, WHOLE) for row in sorting.rows for name in both_names(row)}
    writes = {name: held[name] for name in piece.writes if name in held}
    local = Localized(piece, {}, held, writes)
    values.add(local, part_of(piece, local, states), "none")


class HeldValues:
    """How the values of a stage are held as its steps follow each other.

    Args:
        axes: The axes of their forms.
        held: Forms of what the stage gets; what is not known is whole.
    """

    def __init__(self, axes: Axes, held: Mapping[str, Form]) -> None:
        self.steps: list[tuple[Step, str]] = []
        self._axes, self._held = axes, dict(held)
        self._made: set[str] = set()

    def add(self, local: Localized, part: Part, mode: str) -> None:
        """Add a part, and before it what brings the values that it reads into their form."""
        takes = (self.take(name, local.reads.get(name, WHOLE), mode) for name in part.takes)
        self.steps.append((replace(part, takes=tuple(takes)), mode))
        self._held |= local.writes

    def take(self, name: str, wanted: Form, mode: str = "none") -> str:
        """The name under which a value has a form."""
        held = self._held.get(name, WHOLE)
        if held == wanted:
            return name
        other = f"{name} as {wanted}"
        if other not in self._made:
            self._made.add(other)
            self.steps.append((Conversion(name, other, held, wanted, self._axes), mode))
        return other


def part_of(
    piece: Piece,
    local: Localized,
    states: LocalStates,
    axes: Axes = ALONE,
    group: int = 0,
) -> Part:
    """What runs a piece as one rank of its axes runs it.

    Args:
        piece: The whole piece.
        local: The same as this rank runs it, or a part of that.
        states: Of this rank.
        axes: The axes.
        group: Number of the group that it is.
    """
    nodes = piece.module.graph.nodes
    written = {name for node in nodes for name in written_by(node)}
    own = local.piece
    positions = tuple(i for i, (name, _) in enumerate(own.states) if name in written)
    held = (local.states.get(WeightSlice.of(name).name, Replicate()) for _, name in own.states)
    tensors = (states.get(n, how) for (_, n), how in zip(own.states, held, strict=True))
    return Part(
        own,
        tuple(tensors),
        (*own.inputs, *own.reads),
        states.device,
        positions,
        axes,
        group if any(draws(node) for node in nodes) else None,
    )


def _prologue(program: Program, steps: Iterable[Step], device: str) -> Piece | None:
    """What the steps need of masks, positions and shapes, as one piece."""
    needed = {name for step in steps for name in step.takes} & program.prologue
    nodes = prologue_of(program, needed)
    return extract(program, nodes, sorted(needed), device) if nodes else None
