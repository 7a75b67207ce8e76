"""The analytic cost model: roofline compute, α-β collectives, ZeRO, recompute and offload.

A mesh runs at its slowest device kind. Devices that share a core take turns, so a mesh with two
ranks on a core takes twice as long.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from rlplace.cluster.types import Cluster, CollectiveKind, DeviceKind
from rlplace.cost import memory
from rlplace.cost.collectives import Ring, point_to_point, ring, seconds
from rlplace.cost.compute import Compute, beside, compute, slower
from rlplace.cost.context import context_collectives, ring_attention
from rlplace.cost.exchanges import state_exchanges
from rlplace.cost.slices import in_slices
from rlplace.cost.types import GroupCost
from rlplace.graph.types import Collective, Layout, Structure, Work
from rlplace.plan.types import JOINED, GroupChoice, Instance, Mesh
from rlplace.units import MIB

#: Bytes/s of a host's memory for each of its devices: eight DDR4 channels a socket, two sockets,
#: eight devices.
_HOST_MEMORY = 50e9
#: Passes over the gradients that take their norm and clip them.
_CLIP_PASSES = 3
#: Bytes on which rings are compared.
_PROBE = 16 * MIB


@dataclass(frozen=True, slots=True)
class MeshView:
    """What the cost of a group depends on; equal for meshes that cost the same.

    Args:
        kinds: Distinct device kinds.
        turns: Largest number of devices that share one core.
        axes: Degrees (dp_replicate, dp_shard, cp, tp).
        tp: The tp groups' links.
        cp: The cp groups' links.
        shard: The links of the groups that ZeRO shards over, dp_shard and cp.
        replicate: The dp_replicate groups' links.
        dp: The links of all that hold the same parameters.
    """

    kinds: tuple[str, ...]
    turns: int
    axes: tuple[int, int, int, int]
    tp: Ring
    cp: Ring
    shard: Ring
    replicate: Ring
    dp: Ring

    def described(self, cluster: Cluster) -> list[DeviceKind]:
        """The kinds themselves."""
        return [kind for kind in cluster.kinds if kind.name in self.kinds]


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
        mesh.cp_groups(),
        tuple(own[offset :: mesh.tp] for own in blocks for offset in range(mesh.tp)),
        tuple(mesh.devices[offset::block] for offset in range(block)),
        mesh.dp_groups(),
    )
    tp, cp, shard, replicate, dp = (
        _slowest_ring(cluster, groups, mesh.devices) for groups in groups_of_axes
    )
    axes = (mesh.dp_replicate, mesh.dp_shard, mesh.cp, mesh.tp)
    return MeshView(kinds, max(cores.values(), default=1), axes, tp, cp, shard, replicate, dp)


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
    _computed: dict[tuple[object, ...], Compute] = field(default_factory=dict)
    _transfers: dict[tuple[object, ...], float] = field(default_factory=dict)
    _numbers: dict[tuple[object, ...], int] = field(default_factory=dict)
    _instances: dict[int, tuple[Instance, int]] = field(default_factory=dict)

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
        settings = self._settings(instance)
        samples, boundary = samples / mesh.cp, boundary / mesh.cp
        key = (id(structure), choice, id(looks), samples, boundary, settings)
        if key not in self._groups:
            share = _Share(
                instance=instance,
                layout=find_layout(structure, choice.layout, mesh.tp),
                choice=choice,
                mesh=mesh,
                looks=looks,
                samples=samples,
                compute=self._compute(instance, structure, choice, mesh.tp, looks, samples),
                around=context_collectives(structure, mesh),
            )
            # The structure is held, so that its id is not used again.
            self._groups[key] = (structure, _group(share, boundary))
        return self._groups[key][1]

    def _settings(self, instance: Instance) -> int:
        """A number that stands for what a cost depends on beside the group."""
        if id(instance) not in self._instances:
            number = self._numbers.setdefault(_settings(instance), len(self._numbers))
            # The instance is held, so that its id is not used again.
            self._instances[id(instance)] = (instance, number)
        return self._instances[id(instance)][1]

    def _compute(
        self,
        instance: Instance,
        structure: Structure,
        choice: GroupChoice,
        degree: int,
        looks: MeshView,
        samples: float,
    ) -> Compute:
        """Compute of a group, which ZeRO and recompute do not change."""
        layout, slices, settings = choice.layout, choice.slices, self._settings(instance)
        key = (id(structure), layout, slices, degree, id(looks), samples, settings)
        if key not in self._computed:
            work = find_layout(structure, layout, degree).work
            work = work if slices == 1 else in_slices(work, choice)
            kinds = looks.described(instance.cluster)
            found = compute(instance, work, kinds, looks.turns, samples)
            self._computed[key] = ring_attention(found, looks.axes[2])
        return self._computed[key]

    def transfer(
        self, instance: Instance, source: Mesh, target: Mesh, floats: float, other: float
    ) -> float:
        """See `rlplace.cost.types.CostModel.transfer`.

        Each tp rank gets a copy of its own, or its part, and gathers the others'.
        """
        size = floats * instance.bytes.activation + other
        parts = instance.execution.parts
        key = (instance.cluster.fingerprint, source, target, size, parts)
        if key not in self._transfers:
            self._transfers[key] = _transfer(self, instance.cluster, source, target, size, parts)
        return self._transfers[key]

    def looks(self, instance: Instance, mesh: Mesh) -> MeshView:
        """See `rlplace.cost.types.CostModel.looks`."""
        return self.view(instance.cluster, mesh)

    def knows(
        self, instance: Instance, structure: Structure, choice: GroupChoice, mesh: Mesh
    ) -> bool:
        """See `rlplace.cost.types.CostModel.knows`."""
        return True


def _transfer(
    cost: AnalyticCost, cluster: Cluster, source: Mesh, target: Mesh, size: float, parts: bool
) -> float:
    if parts:
        gathered = size / target.dp
        gather = seconds("all_gather", gathered, cost.view(cluster, target).tp)
        return point_to_point(cluster, source.devices, target.devices, size) + gather
    senders = source.devices[:: source.tp]
    receivers = target.devices[:: target.tp]
    once = point_to_point(cluster, senders, receivers, size)
    nodes = {cluster.devices[d].node for d in (*source.devices, *target.devices)}
    return once * (target.tp if len(nodes) > 1 else 1)


def _settings(instance: Instance) -> tuple[object, ...]:
    """What a cost depends on beside the group; kinds of one name may differ, once calibrated."""
    return (
        instance.precision,
        instance.optimizer,
        instance.attention,
        instance.loss_chunks,
        instance.fused,
        instance.execution,
        instance.global_batch,
        instance.cluster.fingerprint,
    )


@dataclass(frozen=True, slots=True)
class _Share:
    """A group with a choice on a mesh: what one device does of it for `samples` of a replica.

    Of a replica's samples a rank of the cp axis has its part (`rlplace.cost.context`).
    """

    instance: Instance
    layout: Layout
    choice: GroupChoice
    mesh: Mesh
    looks: MeshView
    samples: float
    compute: Compute
    around: tuple[Collective, ...]

    @property
    def work(self) -> Work:
        return self.layout.work

    @property
    def kinds(self) -> list[DeviceKind]:
        return self.looks.described(self.instance.cluster)

    @property
    def overlap(self) -> float:
        return min(kind.overlap for kind in self.kinds)

    @property
    def micro_batches(self) -> float:
        # Of unequal shares the largest may be more than its part of the only micro-batch.
        all_of_them = self.samples * self.mesh.cp * self.mesh.dp
        return max(1.0, self.instance.global_batch / all_of_them)


def _group(share: _Share, boundary: float) -> GroupCost:
    instance, choice, mesh, samples = share.instance, share.choice, share.mesh, share.samples
    own, run = share.compute, share.instance.execution
    forward_exchange, forward_count = _exchange(share, "forward")
    backward_exchange, backward_count = _exchange(share, "backward")
    launch = run.collective_launch
    forward = slower(own.forward + forward_exchange, own.host_forward + forward_count * launch)
    light = slower(own.light, own.host_forward)
    light += run.redone_matmuls * (own.matmul + forward_exchange)
    redo = {"none": 0.0, "attention": own.attention, "ops": light, "full": forward}
    backward = slower(
        own.backward + backward_exchange + _accumulate_seconds(share),
        own.host_backward + backward_count * launch,
    )
    backward += redo["full" if choice.recompute == JOINED else choice.recompute]
    gather, scatter, reduce, publish = _states_traffic(share)
    overlap = share.overlap * run.overlap_gather
    return GroupCost(
        forward=beside(forward, gather, overlap),
        backward=beside(backward, gather + scatter, overlap),
        reduce=reduce,
        hidden=share.overlap * run.overlap_reduce,
        optimizer=_optimizer_seconds(share) + publish,
        static=memory.states(instance, share.work, choice, mesh).total,
        saved=memory.saved(instance, share.layout, choice, samples, boundary),
        transient=memory.transient(instance, share.layout, choice, mesh, samples),
        logits=memory.logits(instance, share.work, samples),
        weight_backward=own.weight,
        optimizer_transient=memory.step_transient(instance, share.work, choice, mesh),
        skipped=own.last if run.early_stop and choice.recompute in ("full", JOINED) else 0.0,
        redone=memory.redone(instance, share.layout, choice, samples),
    )


def _exchange(share: _Share, phase: str) -> tuple[float, int]:
    """Seconds and number of the layout's collectives of a phase that are exposed.

    Those that run beside the matmuls that they feed come in as many pieces as there are ranks, the
    first of which is exposed, and disturb the matmuls as any other traffic does. Where the backward
    pass gathers again what a sequence layout reads, its gathers run a second time, beside the
    matmuls that make the gradients of the weights.
    """
    run = share.instance.execution
    own = [one for one in share.layout.collectives if one.phase == phase]
    hidden = share.overlap * run.overlap_exchange * (1.0 - 1.0 / share.mesh.tp)
    exposed = sum(_collective_seconds(share, one, share.looks.tp) for one in own) * (1.0 - hidden)
    around = [one for one in share.around if one.phase == phase]
    exposed += sum(_collective_seconds(share, one, share.looks.cp) for one in around)
    own += around
    if phase == "forward" or not run.regather:
        return exposed, len(own)
    again = [
        one
        for one in share.layout.collectives
        if one.phase == "forward" and one.kind == "all_gather"
    ]
    more = sum(_collective_seconds(share, one, share.looks.tp) for one in again)
    more -= share.overlap * min(share.compute.weight, more)
    return exposed + more, len(own) + len(again)


def _collective_seconds(share: _Share, one: Collective, links: Ring) -> float:
    size = one.floats(share.samples) * share.instance.bytes.activation
    return seconds(one.kind, size, links)


def find_layout(structure: Structure, name: str, degree: int) -> Layout:
    """A layout of a structure by name.

    Raises:
        KeyError: If the structure has no such layout at this degree; `check` refuses such plans.
    """
    for layout in structure.layouts_with("tp", degree):
        if layout.name == name:
            return layout
    raise KeyError(f"no layout {name!r} at tp={degree}")


def _states_traffic(share: _Share) -> tuple[float, float, float, float]:
    """Seconds of (gather a pass, scatter a micro-batch, reduce a step, publish a step)."""
    run = share.instance.execution
    found = {"pass": 0.0, "micro-batch": 0.0, "step": 0.0, "publish": 0.0}
    for one in state_exchanges(share.instance, share.work, share.choice, share.mesh):
        ring = getattr(share.looks, one.axis)
        # Weights that are lent come group by group; a part of the gradients as a part of a bucket.
        bucket = 0.0 if one.when == "pass" else run.bucket
        if one.axis == "replicate":
            bucket /= share.looks.shard.ranks
        if one.count > 1:
            found[one.when] += one.count * seconds(one.kind, one.size / one.count, ring)
        else:
            found[one.when] += _bucketed(one.kind, one.size, ring, bucket)
    return found["pass"], found["micro-batch"], found["step"], found["publish"]


def _bucketed(kind: CollectiveKind, size: float, ring: Ring, bucket: float) -> float:
    """Seconds of a collective on `size` bytes, `bucket` of them at a time.

    A group that does not fill a bucket takes its part of one.
    """
    if not bucket:
        return seconds(kind, size, ring)
    return size / bucket * seconds(kind, bucket, ring)


def _accumulate_seconds(share: _Share) -> float:
    """Adding a micro-batch's gradients to the sum of those before; the first has nothing to add."""
    count = share.micro_batches
    size = share.instance.bytes
    params = share.work.params / (share.mesh.shards if share.choice.zero >= 2 else 1)
    added = params * (2 * size.gradient + size.weight)
    return _memory_seconds(share, added) * (1.0 - 1.0 / count)


def _optimizer_seconds(share: _Share) -> float:
    """Reads weight, gradient and states, writes weight and states; bound by memory bandwidth.

    Where the framework clips, the norm of the gradients is taken before that, which reads them,
    and they are scaled, which reads and writes them.

    Offloaded, the gradients go to the host and the weights come back; its own step, which works
    on the parameters that have arrived, takes what its memory takes.
    """
    size = share.instance.bytes
    local = share.work.params / (share.mesh.shards if share.choice.zero else 1)
    states = 2 * share.instance.optimizer_bytes
    if share.choice.offload:
        way = local * max(size.gradient, size.weight)
        slowest = max(way / kind.host_bandwidth for kind in share.kinds)
        return 2 * slowest + local * states / _HOST_MEMORY
    clip = share.work.params / (share.mesh.shards if share.choice.zero >= 2 else 1)
    clip *= _CLIP_PASSES * size.gradient if share.instance.execution.clips else 0
    return _memory_seconds(share, clip + local * (2 * size.weight + size.gradient + states))


def _memory_seconds(share: _Share, moved: float) -> float:
    slowest = max(moved / kind.stream for kind in share.kinds)
    return slowest * share.looks.turns
