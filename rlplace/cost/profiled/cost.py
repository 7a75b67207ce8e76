"""The cost model that reads a profile: measured layers instead of a roofline."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass, field

from rlplace.cluster.types import Cluster
from rlplace.cost import memory
from rlplace.cost.compute import beside
from rlplace.cost.profiled.network import ClusterNetwork, Kind, Network
from rlplace.cost.profiled.types import LayerPoint, LayerTable, Profile
from rlplace.cost.types import GroupCost
from rlplace.errors import InputError
from rlplace.graph.types import Structure, Work
from rlplace.plan.types import GroupChoice, Instance, Mesh


@dataclass
class ProfiledCost:
    """`CostModel` of a graph that `profile_graph` made.

    A mesh of several kinds takes, layer by layer, as long as its slowest. States follow from the
    parameters of the profile and the precision of the instance, and cross the network as ZeRO has
    it; whether gradients are reduced beside the backward pass is a matter of the framework.

    Args:
        profile: The tables.
        network: What passes between devices takes.
    """

    profile: Profile
    network: Network = field(default_factory=ClusterNetwork)
    # With what they are of, so that an id in a key is not used again.
    _groups: dict[tuple[object, ...], tuple[Instance, GroupCost]] = field(default_factory=dict)
    _collectives: dict[tuple[object, ...], tuple[Cluster, float]] = field(default_factory=dict)

    def group(
        self,
        instance: Instance,
        structure: Structure,
        choice: GroupChoice,
        mesh: Mesh,
        samples: float,
        boundary: float,
    ) -> GroupCost:
        """See `rlplace.cost.types.CostModel.group`.

        Raises:
            InputError: If the layer was not measured on a kind of the mesh at its tp degree; if
                the choice is one that a profile of whole layers cannot tell.
        """
        key = (id(instance), structure.hash, choice, mesh, samples, boundary)
        if key not in self._groups:
            found = self._group(instance, structure, choice, mesh, samples, boundary)
            self._groups[key] = (instance, found)
        return self._groups[key][1]

    def transfer(
        self, instance: Instance, source: Mesh, target: Mesh, floats: float, other: float
    ) -> float:
        """See `rlplace.cost.types.CostModel.transfer`."""
        size = floats * instance.bytes.activation + other
        return self.network.transfer(instance.cluster, source, target, size)

    def looks(self, instance: Instance, mesh: Mesh) -> Hashable:
        """See `rlplace.cost.types.CostModel.looks`.

        Which devices are of which kind, on nodes with which links, in the order of the mesh; where
        single pairs have links of their own, the mesh itself.
        """
        cluster = instance.cluster
        if cluster.overrides:
            return mesh
        nodes: dict[int, int] = {}
        members = tuple(
            (
                (device := cluster.devices[rank]).kind,
                nodes.setdefault(device.node, len(nodes)),
                (node := cluster.nodes[device.node]).intra,
                node.nic,
                cluster.bridge(rank),
            )
            for rank in mesh.devices
        )
        return members, mesh.dp_replicate, mesh.dp_shard, mesh.cp, mesh.tp

    def knows(
        self, instance: Instance, structure: Structure, choice: GroupChoice, mesh: Mesh
    ) -> bool:
        """See `rlplace.cost.types.CostModel.knows`."""
        tp = mesh.tp if choice.layout != "replicate" else 1
        kinds = {instance.cluster.devices[device].kind for device in mesh.devices}
        return choice.recompute in ("none", "full") and all(
            (kind, structure.hash, tp) in self.profile.tables for kind in kinds
        )

    def _group(
        self,
        instance: Instance,
        structure: Structure,
        choice: GroupChoice,
        mesh: Mesh,
        samples: float,
        boundary: float,
    ) -> GroupCost:
        if choice.recompute not in ("none", "full"):
            rule = "a profile of whole layers tells 'none' and 'full' only"
            raise InputError("recompute", choice.recompute, rule, "full")
        counted = Counter(instance.cluster.devices[device].kind for device in mesh.devices)
        tp = mesh.tp if choice.layout != "replicate" else 1
        tables = [self.profile.table(kind, structure.hash, tp) for kind in counted]
        points = [table.at(samples) for table in tables]
        forward = max(point.forward for point in points)
        redo = choice.recompute == "full"
        work = self._work(structure, tp)
        gather, scatter, reduce, publish = self._states_traffic(instance, work, choice, mesh)
        overlaps = min(instance.cluster.kind(device).overlap for device in mesh.devices)
        framework = instance.execution
        ahead = overlaps * framework.overlap_gather
        backward = max(point.backward for point in points) + (forward if redo else 0.0)
        return GroupCost(
            forward=beside(forward, gather, ahead),
            backward=beside(backward, gather + scatter, ahead),
            reduce=reduce,
            hidden=overlaps * framework.overlap_reduce,
            optimizer=_optimizer(tables, choice, mesh) + publish,
            static=memory.states(instance, work, choice, mesh).total,
            saved=boundary if redo else max(point.saved for point in points),
            transient=_transient(instance, work, choice, mesh, points, redo=redo),
            optimizer_transient=memory.step_transient(instance, work, choice, mesh),
        )

    def _work(self, structure: Structure, tp: int) -> Work:
        return Work(params=self.profile.params[structure.hash, tp])

    def _states_traffic(
        self, instance: Instance, work: Work, choice: GroupChoice, mesh: Mesh
    ) -> tuple[float, float, float, float]:
        """Seconds to (gather for a pass, scatter a micro-batch, reduce a step, publish a step)."""
        gradients = float(work.params * instance.bytes.gradient)
        weights = float(work.params * instance.bytes.weight)
        if choice.zero == 0 or mesh.dp_shard == 1:
            return 0.0, 0.0, self._across(instance, "all_reduce", mesh, mesh.dp, gradients), 0.0
        shard = mesh.dp_shard
        scatter = self._across(instance, "reduce_scatter", mesh, shard, gradients)
        across = 0.0
        if mesh.dp_replicate > 1:
            across = self._across(instance, "all_reduce", mesh, mesh.dp, gradients / shard)
        gather = self._across(instance, "all_gather", mesh, shard, weights)
        if choice.zero == 1:
            return 0.0, 0.0, scatter + across, gather
        if choice.zero == 2:
            return 0.0, scatter, across, gather
        return gather, scatter, across, 0.0

    def _across(self, instance: Instance, kind: Kind, mesh: Mesh, ranks: int, size: float) -> float:
        """Seconds among the first `ranks` replicas, or all, of the slowest shard."""
        groups = mesh.dp_groups()
        if len(instance.cluster.islands) == 1 and not instance.cluster.overrides:
            groups = groups[:1]  # all are alike
        return max(
            self._collective(instance.cluster, kind, mesh, own[:ranks], size) for own in groups
        )

    def _collective(
        self, cluster: Cluster, kind: Kind, mesh: Mesh, members: tuple[int, ...], size: float
    ) -> float:
        key = (id(cluster), kind, mesh, members, size)
        if key not in self._collectives:
            found = self.network.collective(kind, cluster, mesh, members, size)
            self._collectives[key] = (cluster, found)
        return self._collectives[key][1]


def _optimizer(tables: list[LayerTable], choice: GroupChoice, mesh: Mesh) -> float:
    slowest = max(table.optimizer for table in tables)
    return slowest / (mesh.dp_shard if choice.zero else 1)


def _transient(
    instance: Instance,
    work: Work,
    choice: GroupChoice,
    mesh: Mesh,
    points: list[LayerPoint],
    *,
    redo: bool,
) -> float:
    """What a backward pass needs beside what is saved; gathered weights and whole gradients."""
    size = instance.bytes
    peak = max(point.transient + (point.saved if redo else 0.0) for point in points)
    if choice.zero >= 2 and mesh.dp_shard > 1:
        peak += work.params * size.gradient
    if choice.zero == 3 and mesh.dp_shard > 1:
        peak += work.params * size.weight
    return peak
