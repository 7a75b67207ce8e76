"""The analytic cost model: roofline compute, α-β collectives, ZeRO and recompute.

Compute of a group is matmul FLOPs over the peak times an efficiency that grows with the size of a
kernel, plus bytes of all ops over the memory bandwidth (no fusion), plus launches. A mesh runs at
its slowest device kind. Devices that share a core take turns, so a mesh with two ranks on a core
takes twice as long.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from rlplace.cluster.types import Cluster, DeviceKind
from rlplace.cost import memory
from rlplace.cost.collectives import Ring, point_to_point, ring, seconds
from rlplace.cost.types import GroupCost
from rlplace.graph.types import Layout, Structure, Work
from rlplace.plan.types import GroupChoice, Instance, Mesh
from rlplace.units import MIB

#: Passes over the score matrix that a math attention kernel makes forward (write, read, write the
#: softmax, read it) and backward (the same twice).
_SCORE_PASSES = (4, 8)
#: Bytes on which rings are compared.
_PROBE = 16 * MIB


@dataclass(frozen=True, slots=True)
class MeshView:
    """What the cost of a group depends on; equal for meshes that cost the same.

    Args:
        kinds: Distinct device kinds.
        turns: Largest number of devices that share one core.
        axes: Degrees (dp_replicate, dp_shard, tp).
        tp: The tp groups' links.
        shard: The dp_shard groups' links.
        replicate: The dp_replicate groups' links.
        dp: The links of all replicas together.
    """

    kinds: tuple[str, ...]
    turns: int
    axes: tuple[int, int, int]
    tp: Ring
    shard: Ring
    replicate: Ring
    dp: Ring


def view(cluster: Cluster, mesh: Mesh) -> MeshView:
    """The view of a mesh; the slowest group of each axis stands for all of them."""
    members = [cluster.devices[device] for device in mesh.devices]
    kinds = tuple(sorted({device.kind for device in members}))
    cores = Counter((d.node, d.core) for d in members if d.core is not None)
    inner = mesh.cp * mesh.tp
    block = mesh.dp_shard * inner
    blocks = [mesh.devices[start : start + block] for start in range(0, len(members), block)]
    groups_of_axes = (
        mesh.tp_groups(),
        tuple(own[offset::inner] for own in blocks for offset in range(inner)),
        tuple(mesh.devices[offset::block] for offset in range(block)),
        mesh.dp_groups(),
    )
    tp, shard, replicate, dp = (
        _slowest_ring(cluster, groups, mesh.devices) for groups in groups_of_axes
    )
    axes = (mesh.dp_replicate, mesh.dp_shard, mesh.tp)
    return MeshView(kinds, max(cores.values(), default=1), axes, tp, shard, replicate, dp)


def _slowest_ring(
    cluster: Cluster, groups: tuple[tuple[int, ...], ...], busy: tuple[int, ...]
) -> Ring:
    """The ring of the group that takes longest; all groups are alike where all nodes are."""
    if len(cluster.islands) == 1 and not cluster.overrides:
        return ring(cluster, groups[0], busy)
    rings = dict.fromkeys(ring(cluster, group, busy) for group in groups)
    return max(rings, key=lambda own: seconds("all_reduce", _PROBE, own))


@dataclass
class AnalyticCost:
    """`CostModel` by formula. Pure; caches by what a cost depends on."""

    _views: dict[tuple[str, Mesh], MeshView] = field(default_factory=dict)
    _distinct: dict[MeshView, MeshView] = field(default_factory=dict)
    _groups: dict[tuple[object, ...], tuple[Structure, GroupCost]] = field(default_factory=dict)
    _transfers: dict[tuple[object, ...], float] = field(default_factory=dict)

    def view(self, cluster: Cluster, mesh: Mesh) -> MeshView:
        """`view`, cached; equal views are one object, so that its id may stand for it."""
        key = (cluster.fingerprint, mesh)
        if key not in self._views:
            found = view(cluster, mesh)
            self._views[key] = self._distinct.setdefault(found, found)
        return self._views[key]

    def group(
        self,
        instance: Instance,
        structure: Structure,
        choice: GroupChoice,
        mesh: Mesh,
        samples: float,
        boundary: float,
    ) -> GroupCost:
        """See `rlplace.cost.types.CostModel.group`."""
        looks = self.view(instance.cluster, mesh)
        settings = (
            instance.precision,
            instance.optimizer,
            instance.attention,
            instance.loss_chunks,
            instance.fused,
        )
        cluster = instance.cluster.fingerprint  # kinds of one name may differ, once calibrated
        key = (id(structure), choice, id(looks), samples, boundary, settings, cluster)
        if key not in self._groups:
            cost = _group(instance, structure, choice, mesh, looks, samples, boundary)
            self._groups[key] = (structure, cost)  # held, so that its id is not used again
        return self._groups[key][1]

    def transfer(
        self, instance: Instance, source: Mesh, target: Mesh, floats: float, other: float
    ) -> float:
        """See `rlplace.cost.types.CostModel.transfer`; each tp rank gets a copy of its own."""
        size = floats * instance.bytes.activation + other
        key = (instance.cluster.fingerprint, source, target, size)
        if key not in self._transfers:
            self._transfers[key] = _transfer(instance.cluster, source, target, size)
        return self._transfers[key]


def _transfer(cluster: Cluster, source: Mesh, target: Mesh, size: float) -> float:
    senders = source.devices[:: source.tp]
    receivers = target.devices[:: target.tp]
    once = point_to_point(cluster, senders, receivers, size)
    nodes = {cluster.devices[d].node for d in (*source.devices, *target.devices)}
    return once * (target.tp if len(nodes) > 1 else 1)


def _group(
    instance: Instance,
    structure: Structure,
    choice: GroupChoice,
    mesh: Mesh,
    looks: MeshView,
    samples: float,
    boundary: float,
) -> GroupCost:
    layout = find_layout(structure, choice.layout, mesh.tp)
    work = layout.work
    kinds = [kind for kind in instance.cluster.kinds if kind.name in looks.kinds]
    forward, backward = _compute(instance, work, kinds, looks.turns, samples)
    overlap = min(kind.overlap for kind in kinds)
    exchange = {
        phase: sum(
            seconds(c.kind, c.floats(samples) * instance.bytes.activation, looks.tp)
            for c in layout.collectives
            if c.phase == phase
        )
        for phase in ("forward", "backward")
    }
    gather, scatter, reduce, publish = _states_traffic(instance, work, choice, looks)
    redo = {
        "none": 0.0,
        "attention": _attention_seconds(instance, work, kinds, looks.turns, samples),
        "full": forward + exchange["forward"],
    }[choice.recompute]
    optimizer = _optimizer_seconds(instance, work, choice, mesh, kinds) * looks.turns
    return GroupCost(
        forward=forward + exchange["forward"] + max(0.0, gather - overlap * forward),
        backward=backward
        + redo
        + exchange["backward"]
        + max(0.0, gather + scatter - overlap * backward),
        reduce=reduce,
        hidden=overlap,
        optimizer=optimizer + publish,
        static=memory.states(instance, work, choice, mesh).total,
        saved=memory.saved(instance, work, choice, samples, boundary),
        transient=memory.transient(instance, work, choice, mesh, samples),
        logits=memory.logits(instance, work, samples),
    )


def find_layout(structure: Structure, name: str, degree: int) -> Layout:
    """A layout of a structure by name.

    Raises:
        KeyError: If the structure has no such layout at this degree; `check` refuses such plans.
    """
    for layout in structure.layouts_at(degree):
        if layout.name == name:
            return layout
    raise KeyError(f"no layout {name!r} at tp={degree}")


def _compute(
    instance: Instance, work: Work, kinds: list[DeviceKind], turns: int, samples: float
) -> tuple[float, float]:
    """Seconds of the forward and the backward, on the slowest kind."""
    score = work.score_floats(samples) if instance.attention == "math" else 0.0
    size = instance.bytes.activation
    kernels, forward_moved, backward_moved = instance.traffic(work)
    totals = []
    for flops, moved, passes, launches in (
        (work.flops, forward_moved, _SCORE_PASSES[0], 1),
        (work.backward_flops, backward_moved, _SCORE_PASSES[1], 2),
    ):
        bytes_moved = (moved(samples) + passes * score) * size
        slowest = max(
            matmul_seconds(kind, instance.bytes.compute, flops(samples), work.matmuls * launches)
            + bytes_moved / (kind.bandwidth * kind.memory_efficiency)
            + kernels * launches * kind.launch_overhead
            for kind in kinds
        )
        totals.append(slowest * turns)
    return totals[0], totals[1]


def _attention_seconds(
    instance: Instance, work: Work, kinds: list[DeviceKind], turns: int, samples: float
) -> float:
    """Seconds of the forward of the core attention alone, as one kernel."""
    flops = work.attention_flops(samples)
    if flops == 0.0:
        return 0.0
    score = work.score_floats(samples) if instance.attention == "math" else 0.0
    bytes_moved = _SCORE_PASSES[0] * score * instance.bytes.activation
    slowest = max(
        matmul_seconds(kind, instance.bytes.compute, flops, 1)
        + bytes_moved / (kind.bandwidth * kind.memory_efficiency)
        + kind.launch_overhead
        for kind in kinds
    )
    return slowest * turns


def matmul_seconds(kind: DeviceKind, dtype: str, flops: float, kernels: int) -> float:
    """Seconds of `flops` in `kernels` equal matmuls: efficiency ``max * x / (x + half)``."""
    if flops <= 0.0:
        return 0.0
    each = flops / max(kernels, 1)
    efficiency = kind.max_efficiency * each / (each + kind.half_flops)
    return flops / (kind.peak_flops[dtype] * efficiency)


def _states_traffic(
    instance: Instance, work: Work, choice: GroupChoice, looks: MeshView
) -> tuple[float, float, float, float]:
    """Seconds of (gather a pass, scatter a micro-batch, reduce a step, publish a step).

    ZeRO-0 all-reduces gradients; ZeRO-1 reduce-scatters them and gathers the updated weights;
    ZeRO-2 reduce-scatters after every micro-batch; ZeRO-3 also gathers before every pass.
    """
    shard = looks.shard.ranks
    gradients = float(work.params * instance.bytes.gradient)
    weights = float(work.params * instance.bytes.weight)
    if choice.zero == 0 or shard == 1:
        return 0.0, 0.0, seconds("all_reduce", gradients, looks.dp), 0.0
    scatter = seconds("reduce_scatter", gradients, looks.shard)
    across = seconds("all_reduce", gradients / shard, looks.replicate)
    publish = seconds("all_gather", weights, looks.shard)
    if choice.zero == 1:
        return 0.0, 0.0, scatter + across, publish
    if choice.zero == 2:
        return 0.0, scatter, across, publish
    frozen = float(work.frozen_params * instance.bytes.weight)
    return seconds("all_gather", weights + frozen, looks.shard), scatter, across, 0.0


def _optimizer_seconds(
    instance: Instance, work: Work, choice: GroupChoice, mesh: Mesh, kinds: list[DeviceKind]
) -> float:
    """Reads weight, gradient and states, writes weight and states; bound by memory bandwidth."""
    local = work.params / (mesh.dp_shard if choice.zero else 1)
    size = instance.bytes
    bytes_moved = local * (2 * size.weight + size.gradient + 2 * instance.optimizer_bytes)
    return max(bytes_moved / (kind.bandwidth * kind.memory_efficiency) for kind in kinds)
