"""The borders of a plan as one rank sees them: a channel for each direction."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rlplace.plan.schedules import lanes
from rlplace.plan.types import Plan
from rlplace.runtime.boundary import TensorSpec, borders, specs, stage_of
from rlplace.runtime.model import Model
from rlplace.runtime.transfer import Channel, check_cuttable, messages
from rlplace.runtime.world import World


@dataclass(frozen=True)
class Border:
    """Both directions of the border before a stage."""

    forward: Channel
    backward: Channel


def connections(world: World, plan: Plan, model: Model) -> dict[int, Border]:
    """The borders that this rank's stages touch, by the index of the later stage.

    Tags count on over all borders, directions and micro-batches, so none is used twice in a step.
    """
    crossing = borders(model.program, stage_of(model.graph, plan), len(plan.stages))
    found: dict[int, Border] = {}
    tag = 0
    every = [_tensors(plan, model, border, nodes) for border, nodes in enumerate(crossing)]
    each = sum(2 * sum(_count(plan, i, t, b) for b in (False, True)) for i, t in enumerate(every))
    bounded = len(lanes(plan)) == len(plan.stages)
    for index, tensors in enumerate(every):
        earlier, later = plan.stages[index].mesh, plan.stages[index + 1].mesh
        pair = []
        for backward, ends in ((False, (earlier, later)), (True, (later, earlier))):
            pair.append(
                Channel(
                    tensors,
                    *ends,
                    plan.micro_batch,
                    backward,
                    rank=world.rank,
                    device=world.device,
                    group=world.direction(backward),
                    tags=(tag, each),
                    bounded=bounded,
                )
            )
            tag += _count(plan, index, tensors, backward)
        if world.rank in (*earlier.devices, *later.devices):
            found[index + 1] = Border(*pair)
    return found


def _count(plan: Plan, border: int, tensors: Sequence[TensorSpec], backward: bool) -> int:
    ends = (plan.stages[border].mesh, plan.stages[border + 1].mesh)
    sender, receiver = ends[::-1] if backward else ends
    return len(messages(tensors, sender, receiver, plan.micro_batch, backward))


def _tensors(plan: Plan, model: Model, border: int, nodes: list[Any]) -> tuple[TensorSpec, ...]:
    tensors = specs(model.program, nodes)
    if plan.stages[border].mesh.dp != plan.stages[border + 1].mesh.dp:
        check_cuttable(tensors, border)
    return tensors
