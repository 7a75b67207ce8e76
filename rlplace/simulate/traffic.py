"""Bytes that the ranks of a plan give to each kind of collective in one step, by the graph.

They have the meaning of `rlplace.runtime.measure.Measurement.traffic`: what each rank puts into a
collective (its shard for an all-gather, the whole tensor for an all-reduce or a reduce-scatter),
added up over all ranks. What stages send to each other follows from the exported model
(`rlplace.runtime.planned`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from rlplace.cost.analytic import find_layout
from rlplace.cost.context import context_collectives
from rlplace.cost.exchanges import When, state_exchanges
from rlplace.graph.types import OpGraph, Shard, Work
from rlplace.plan.types import JOINED, GroupChoice, Instance, Mesh, Plan, Stage
from rlplace.simulate.stages import users

#: Modes that run the forward of a group again, with its collectives.
_REDONE = ("full", "ops", JOINED)


#: Bytes by kind of communication.
Sizes = defaultdict[str, float]


def layout_traffic(instance: Instance, plan: Plan) -> dict[str, float]:
    """What the layouts of all groups bring with them, as the seconds of an estimate count it.

    A group that is redone is counted to send all of its forward again. A run stops with the last
    tensor that the backward pass needs, so it may send less (`rlplace.runtime.rehearsal`).

    Args:
        instance: The question.
        plan: A legal plan.
    """
    found = Sizes(float)
    for stage in plan.stages:
        for kind, size in _layouts(instance, plan, stage).items():
            found[kind] += size
    return dict(found)


def state_traffic(instance: Instance, plan: Plan) -> dict[str, float]:
    """Gradients and weights, by ZeRO level, and the gradients that several meshes sum together.

    Padding of flat buffers is not counted.

    Args:
        instance: The question.
        plan: A legal plan.
    """
    found = _states(instance, plan)
    for kind, size in _tied(instance, plan).items():
        found[kind] += size
    return dict(found)


def _layouts(instance: Instance, plan: Plan, stage: Stage) -> Sizes:
    """What the layouts of a stage bring with them, for all micro-batches and all its ranks."""
    mesh, found = stage.mesh, Sizes(float)
    samples = plan.micro_batch / mesh.dp / mesh.cp  # bytes are linear in them, so shares are alike
    for group, choice in zip(range(stage.start, stage.stop), stage.choices, strict=True):
        structure = instance.graph.structure(group)
        layout = find_layout(structure, choice.layout, mesh.tp)
        around = context_collectives(structure, mesh)
        for own, degree in ((layout.collectives, mesh.tp), (around, mesh.cp)):
            redone = choice.recompute in _REDONE
            again = [one for one in own if redone and one.phase == "forward"]
            for one in (*own, *again):
                shared = one.kind in ("all_gather", "all_to_all")
                given = one.floats(samples) * instance.bytes.activation
                given *= plan.micro_batches * len(mesh.devices)
                found[one.kind] += given / (degree if shared else 1)
    return found


def _states(instance: Instance, plan: Plan) -> Sizes:
    """Gradients and weights, by ZeRO level."""
    found = Sizes(float)
    times: dict[When, int] = {
        "pass": 2 * plan.micro_batches,
        "micro-batch": plan.micro_batches,
        "step": 1,
        "publish": 1,
    }
    for mesh, work, choice, summed in _held(instance, plan):
        for one in state_exchanges(instance, work, choice, mesh):
            if one.ranks > 1 and (summed or one.when != "step"):
                found[one.kind] += one.given * times[one.when] * len(mesh.devices)
    return found


def _held(instance: Instance, plan: Plan) -> Iterator[tuple[Mesh, Work, GroupChoice, bool]]:
    """Parameters of each mesh, each once, and whether they are summed over its replicas alone."""
    graph = instance.graph
    seen: set[tuple[Mesh, str]] = set()
    for stage in plan.stages:
        for group, choice in zip(range(stage.start, stage.stop), stage.choices, strict=True):
            work = find_layout(graph.structure(group), choice.layout, stage.mesh.tp).work
            alone = work.params
            for name, elements in graph.tied:
                if name not in graph.groups[group].params:
                    continue
                own = elements // _cut(graph, group, choice, name, stage.mesh.tp)
                alone -= own
                if (stage.mesh, name) not in seen:
                    seen.add((stage.mesh, name))
                    summed = len(_holders(graph, plan, name)) == 1
                    yield stage.mesh, Work(params=own), choice, summed
            rest = Work(params=alone, frozen_params=work.frozen_params)
            yield stage.mesh, rest, choice, True


def _cut(graph: OpGraph, group: int, choice: GroupChoice, name: str, tp: int) -> int:
    """Into how many parts a group's layout cuts a parameter."""
    layout = find_layout(graph.structure(group), choice.layout, tp)
    places = dict(zip(graph.groups[group].params, layout.params, strict=False))
    return tp if isinstance(places.get(name), Shard) else 1


def _holders(graph: OpGraph, plan: Plan, name: str) -> list[Mesh]:
    """The meshes that hold a parameter."""
    having = (stage.mesh for stage in plan.stages if users(graph, stage, name))
    return list(dict.fromkeys(having))


def _tied(instance: Instance, plan: Plan) -> Sizes:
    """The sums of gradients that several meshes hold: whole, over all their ranks."""
    found = Sizes(float)
    for name, elements in instance.graph.tied:
        meshes = _holders(instance.graph, plan, name)
        if len(meshes) > 1:
            ranks = sum(len(mesh.devices) for mesh in meshes)
            found["all_reduce"] += elements * instance.bytes.gradient * ranks
    return found
