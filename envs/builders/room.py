"""Whether an instance has any plan that fits: the leanest choices on coarse pipelines."""

from __future__ import annotations

from collections.abc import Iterator
from math import lcm

from rlplace.plan.types import Instance, Mesh
from rlplace.planners.meshes import mesh_shapes
from rlplace.planners.stage_solver import StageSolver

#: A pipeline of single devices is tried up to this many.
_MOST_STAGES = 16


def has_room(instance: Instance, solver: StageSolver | None = None) -> bool:
    """Whether a pipeline with one stage an island, a node or a device fits in memory.

    The micro-batch has as few samples as the replicas allow, and every stage takes as many
    groups as its leanest choices let it. A plan may fit where this says no; where it says yes,
    the pipeline that it found does.

    Args:
        instance: The question.
        solver: Shared with the caller, so that its tables are built once.
    """
    own = solver or StageSolver(instance)
    return any(
        _reaches_start(instance, own, meshes)
        for parts in _partitions(instance)
        for meshes in _pipelines(instance, parts)
    )


def _partitions(instance: Instance) -> Iterator[tuple[tuple[int, ...], ...]]:
    cluster = instance.cluster
    islands = cluster.islands
    yield islands
    nodes: dict[int, list[int]] = {}
    for island in islands:
        for device in island:
            nodes.setdefault(cluster.devices[device].node, []).append(device)
    for parts in (tuple(map(tuple, nodes.values())), tuple((d.index,) for d in cluster.devices)):
        if 1 < len(parts) <= _MOST_STAGES:
            yield parts


def _pipelines(
    instance: Instance, parts: tuple[tuple[int, ...], ...]
) -> Iterator[tuple[Mesh, ...]]:
    """Meshes for the parts: all replicas, or tp as wide as it goes."""
    batch = instance.global_batch
    shapes = [mesh_shapes(instance, part, batch) for part in parts]
    if all(shapes):
        yield tuple(options[0] for options in shapes)
        widest = tuple(max(options, key=lambda mesh: mesh.tp) for options in shapes)
        if any(mesh.tp > 1 for mesh in widest):
            yield widest


def _reaches_start(instance: Instance, solver: StageSolver, meshes: tuple[Mesh, ...]) -> bool:
    micro_batch = lcm(*(mesh.dp for mesh in meshes))
    if instance.global_batch % micro_batch:
        return False
    count = instance.global_batch // micro_batch
    stop = len(instance.graph.groups)
    for behind, mesh in enumerate(reversed(meshes)):
        row = solver.row(stop, mesh, count, min(count, behind + 1))
        fitting = (row.overflow <= 0.0).nonzero()[0]
        stop = int(fitting[0]) if len(fitting) else stop
        if stop == 0:
            return True
    return False
