"""What one stage costs: the sum of its groups, and the gradient reduction that stays exposed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import NamedTuple

from rlplace.cost import memory
from rlplace.cost.analytic import find_layout
from rlplace.cost.types import CostModel, GroupCost
from rlplace.graph.types import Group, OpGraph, Shard, Work
from rlplace.plan.types import JOINED, GroupChoice, Instance, Mesh, Stage

#: Recompute modes that save a group's class scores in the backward pass only.
_REDONE = ("ops", "full", JOINED)


class Bucket(NamedTuple):
    """A part of a stage's gradients that is reduced as one.

    Args:
        seconds: Of its reduction, as far as it can run beside compute.
        ready: The part of a whole backward after which it is ready (0 to 1).
        ready_apart: The same, of a backward that makes gradients of parameters only.
    """

    seconds: float
    ready: float
    ready_apart: float


@dataclass(frozen=True, slots=True)
class StageCost:
    """Seconds of one micro-batch and of a step, and bytes on the heaviest device of a stage.

    Args:
        forward: Seconds of the forward of one micro-batch.
        backward: Of its whole backward.
        exposed_reduce: Of the gradient reduction that is left after a whole backward, if the
            stage is alone on its mesh.
        optimizer: Of the optimizer step.
        params, gradients, optimizer_states: Bytes.
        saved: Bytes kept for each micro-batch in flight.
        transient: Bytes that come and go while a group runs.
        saved_logits: The part of `saved` that is class scores.
        transient_logits: The part of `transient` that is class scores.
        weight_backward: The part of `backward` that makes gradients of parameters only (seconds).
        optimizer_transient: Bytes that come and go in the optimizer step.
        buckets: What is reduced beside the backward.
        late_reduce: Seconds of reduction that cannot run beside it.
    """

    forward: float
    backward: float
    exposed_reduce: float
    optimizer: float
    params: float
    gradients: float
    optimizer_states: float
    saved: float
    transient: float
    saved_logits: float = 0.0
    transient_logits: float = 0.0
    weight_backward: float = 0.0
    optimizer_transient: float = 0.0
    buckets: tuple[Bucket, ...] = ()
    late_reduce: float = 0.0


def boundaries(graph: OpGraph) -> tuple[tuple[float, float, float, float], ...]:
    """What each group reads: floats (base, per sample) and other bytes (base, per sample)."""
    seen: set[tuple[int, str]] = set()
    totals = [[0.0] * 4 for _ in graph.groups]
    for edge in graph.edges:
        if (edge.dst, edge.tensor) in seen:
            continue
        seen.add((edge.dst, edge.tensor))
        total = totals[edge.dst]
        for place, affine in ((0, edge.floats), (2, edge.other_bytes)):
            total[place] += affine.base
            total[place + 1] += affine.per_sample
    return tuple((a, b, c, d) for a, b, c, d in totals)


def boundary_bytes(
    instance: Instance, boundary: tuple[float, float, float, float], samples: float
) -> float:
    """Bytes of a group's inputs for one micro-batch of `samples` on one replica."""
    floats = boundary[0] + boundary[1] * samples
    return floats * instance.bytes.activation + boundary[2] + boundary[3] * samples


def stage_cost(
    instance: Instance,
    stage: Stage,
    micro_batches: int,
    cost: CostModel,
    reads: tuple[tuple[float, float, float, float], ...],
    samples: float | None = None,
) -> StageCost:
    """Cost of a stage.

    Args:
        instance: The question.
        stage: The stage.
        micro_batches: Micro-batches of a step.
        cost: The cost model.
        reads: `boundaries` of the graph.
        samples: Of a replica and a micro-batch; by default all replicas have as many.
    """
    if samples is None:
        samples = instance.global_batch / micro_batches / stage.mesh.dp
    known: dict[tuple[int, GroupChoice, float], tuple[GroupCost, memory.StateBytes]] = {}
    found = []
    for index, choice in zip(range(stage.start, stage.stop), stage.choices, strict=True):
        kept = boundary_bytes(instance, reads[index], samples)
        key = (instance.graph.groups[index].structure, choice, kept)
        if key not in known:
            structure = instance.graph.structure(index)
            work = find_layout(structure, choice.layout, stage.mesh.tp).work
            known[key] = (
                cost.group(instance, structure, choice, stage.mesh, samples, kept),
                memory.states(instance, work, choice, stage.mesh),
            )
        found.append(known[key])
    groups = stopped([group for group, _ in found], stage.choices)
    twice = [
        tied_states(instance, group, stage.choices[group.index - stage.start], stage.mesh, tied)
        for tied in instance.graph.tied
        for group in users(instance.graph, stage, tied[0])[1:]
    ]
    most = fullest(groups, stage.choices)
    redone = [choice.recompute in _REDONE for choice in stage.choices]

    def total(name: str) -> float:
        """The sum of a field over all groups; equal layers share one object."""
        return float(sum(count * getattr(group, name) for group, count in alike.values()))

    alike: dict[int, tuple[GroupCost, int]] = {}
    for group in groups:
        alike[id(group)] = (group, alike.get(id(group), (group, 0))[1] + 1)
    return StageCost(
        forward=total("forward"),
        backward=total("backward"),
        exposed_reduce=exposed_reduce(groups),
        optimizer=total("optimizer"),
        params=sum(held.params for _, held in found) - sum(t.params for t in twice),
        gradients=sum(held.gradients for _, held in found) - sum(t.gradients for t in twice),
        optimizer_states=sum(held.optimizer for _, held in found) - sum(t.optimizer for t in twice),
        saved=total("saved"),
        transient=most.transient,
        saved_logits=sum(g.logits for g, redo in zip(groups, redone, strict=True) if not redo),
        transient_logits=most.logits,
        weight_backward=total("weight_backward"),
        optimizer_transient=total("optimizer_transient"),
        buckets=buckets(groups),
        late_reduce=sum((1.0 - group.hidden) * group.reduce for group in groups),
    )


def stopped(groups: list[GroupCost], choices: Sequence[GroupChoice]) -> list[GroupCost]:
    """The groups, the last of those that are redone as one without what its redoing leaves out."""
    following = [choice.recompute for choice in choices[1:]]
    return [
        replace(group, backward=group.backward - group.skipped)
        if group.skipped and after != JOINED
        else group
        for group, after in zip(groups, (*following, "none"), strict=True)
    ]


class Moment(NamedTuple):
    """Bytes that come and go at a moment of a backward pass, and those of them in class scores."""

    transient: float
    logits: float


def fullest(groups: Sequence[GroupCost], choices: Sequence[GroupChoice]) -> Moment:
    """The moment at which most comes and goes.

    Groups that are redone as one are all saved again before the last of them is in backward, which
    frees what it has used.
    """
    most = Moment(0.0, 0.0)
    before = logits = 0.0
    for group, choice in zip(groups, choices, strict=True):
        if choice.recompute != JOINED:
            before = logits = 0.0
        logits += group.logits if choice.recompute in _REDONE else 0.0
        most = max(most, Moment(before + group.transient, logits))
        before += group.redone
    return most


def users(graph: OpGraph, stage: Stage, name: str) -> list[Group]:
    """The groups of a stage that use a parameter."""
    return [group for group in graph.groups[stage.start : stage.stop] if name in group.params]


def tied_states(
    instance: Instance, group: Group, choice: GroupChoice, mesh: Mesh, tied: tuple[str, int]
) -> memory.StateBytes:
    """What one use of a tied parameter adds to the sum of a stage's groups.

    Args:
        instance: The question.
        group: A group that uses it.
        choice: How the group runs.
        mesh: Where it runs.
        tied: Name and elements of the whole parameter.
    """
    name, elements = tied
    layout = find_layout(instance.graph.structure(group.index), choice.layout, mesh.tp)
    places = dict(zip(group.params, layout.params, strict=False))
    shards = mesh.tp if isinstance(places.get(name), Shard) else 1
    return memory.states(instance, Work(params=elements // shards), choice, mesh)


def buckets(groups: Sequence[GroupCost]) -> tuple[Bucket, ...]:
    """A bucket for each group that reduces something, in the order in which backward runs.

    A group's gradients are ready when the backward of the group is done. Only the share
    `GroupCost.hidden` of a reduction can run beside compute.
    """
    whole, apart = (
        list(accumulate(seconds))
        for seconds in (
            (group.backward for group in reversed(groups)),
            (group.weight_backward for group in reversed(groups)),
        )
    )
    return tuple(
        Bucket(group.hidden * group.reduce, _part(clock, whole[-1]), _part(other, apart[-1]))
        for group, clock, other in zip(reversed(groups), whole, apart, strict=True)
        if group.hidden * group.reduce > 0.0
    )


def _part(seconds: float, total: float) -> float:
    return seconds / total if total > 0.0 else 1.0


def exposed_reduce(groups: list[GroupCost]) -> float:
    """Seconds of gradient reduction that remain after the last backward, without simulating.

    What the event simulator makes of `buckets` where a stage has a mesh to itself; searches weigh
    stages by it. The last micro-batch's backward runs through the groups from the last to the
    first; each group's reduction queues behind the former ones as soon as its own backward is
    done. Only the share `GroupCost.hidden` of a reduction can run beside compute.
    """
    clock = channel = exposed = 0.0
    for group in reversed(groups):
        clock += group.backward
        channel = max(channel, clock) + group.hidden * group.reduce
        exposed += (1.0 - group.hidden) * group.reduce
    return exposed + max(0.0, channel - clock)
