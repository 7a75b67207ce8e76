"""The borders of a plan as one rank sees them: a channel for each direction."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from rlplace.errors import InputError
from rlplace.graph.program import Program
from rlplace.graph.types import OpGraph, Shard
from rlplace.plan.types import Plan
from rlplace.runtime.boundary import TensorSpec, forms, specs
from rlplace.runtime.handover import Handover, handovers
from rlplace.runtime.slices import Crossing, Side
from rlplace.runtime.transfer import Channel
from rlplace.runtime.world import World


@dataclass(frozen=True)
class Border:
    """Both directions of the border before a stage."""

    forward: Channel
    backward: Channel

    def channel(self, backward: bool) -> Channel:
        """One of them."""
        return self.backward if backward else self.forward


def crossings(program: Program, graph: OpGraph, plan: Plan) -> list[tuple[Crossing, Crossing]]:
    """What crosses each border of a plan, forward and backward.

    Raises:
        InputError: If a tensor cannot cross a border.
    """
    every = handovers(program, graph, plan)
    held = forms(graph, plan, [handover.nodes for handover in every])
    found = []
    for index, handover in enumerate(every):
        tensors, names = specs(program, handover.nodes), handover.names
        earlier, later = (
            Side(plan.stages[at], tuple(held[at][spec.name] for spec in tensors))
            for at in (index, index + 1)
        )
        for side in (earlier, later):
            _refuse_cut_rows(handover, tensors, side)
        tensors = tuple(replace(spec, name=names[spec.name]) for spec in tensors)
        size = plan.micro_batch
        there = Crossing(tensors, earlier, later, size, backward=False)
        found.append((there, Crossing(tensors, later, earlier, size, backward=True)))
    return found


def _refuse_cut_rows(handover: Handover, tensors: Sequence[TensorSpec], side: Side) -> None:
    """Refuse rows that each rank of a tp axis has sorted for itself."""
    for spec, form in zip(tensors, side.forms, strict=True):
        moved = any(spec.name in sorting.rows for sorting in handover.sortings)
        cut = any(isinstance(p, Shard) and p.dim == 0 for p in (form.cp, form.tp))
        if moved and cut:
            rule = f"{spec.name} has the rows of a rank of tp, which other ranks do not have"
            near = "layouts that sort all rows on every rank"
            raise InputError("plan.stages.choices.layout", str(form), rule, near)


def connections(
    world: World, plan: Plan, every: Sequence[tuple[Crossing, Crossing]]
) -> dict[int, Border]:
    """The borders that this rank's stages touch, by the index of the later stage.

    Args:
        world: The ranks; all that have a stage call this.
        plan: The plan.
        every: Its `crossings`.
    """
    each = 2 * sum(len(there.tensors) for there, _ in every)
    found: dict[int, Border] = {}
    tag = 0
    for index, pair in enumerate(every, 1):
        channels = []
        for crossing in pair:
            channels.append(Channel(crossing, world, (tag, each)))
            tag += len(crossing.tensors)
        meshes = plan.stages[index - 1].mesh, plan.stages[index].mesh
        if any(world.rank in mesh.devices for mesh in meshes):
            found[index] = Border(*channels)
    _meet(world, every)
    return found


def _meet(world: World, every: Sequence[tuple[Crossing, Crossing]]) -> None:
    """Let all pairs of ranks connect, in one order, before a schedule makes them wait.

    NCCL connects a pair when both have called it for the first time.
    """
    pairs = {
        (message.source, message.target)
        for pair in every
        for crossing in pair
        for rows in _row_counts(crossing)
        for message in crossing.messages(rows)
        if message.source != message.target
    }
    word = torch.zeros(1, device=world.device)
    for source, target in sorted(pairs):
        group = world.direction(down=target < source)
        if world.rank == source:
            dist.send(word, target, group)
        elif world.rank == target:
            dist.recv(word, source, group)


def _row_counts(crossing: Crossing) -> Sequence[int]:
    """Rows of a micro-batch with which all pairs occur that ever do.

    A tensor without samples comes from replicas that have some, and these change with the rows.
    """
    every = all(spec.batch_dim is not None for spec in crossing.tensors)
    return (crossing.micro_batch,) if every else range(1, crossing.micro_batch + 1)
