"""What the least costs of all structures of an instance share: splits, links, offers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import product

import numpy as np

from rlplace.cluster.types import DeviceKind
from rlplace.cost import memory
from rlplace.graph.types import Layout, Structure, Work
from rlplace.plan.types import GroupChoice, Instance, Mesh
from rlplace.simulate.bounds.links import BestLinks, Table
from rlplace.simulate.bounds.splits import Floats, Splits, splits

#: ZeRO levels.
_LEVELS = (0, 1, 2, 3)


@dataclass(frozen=True, slots=True)
class Tables:
    """The collectives of the data-parallel axes, for all splits."""

    whole: Table
    across: Table
    scatter: Table
    gather: Table

    @staticmethod
    def of(links: BestLinks, cut: Splits) -> Tables:
        """Those on the best links."""
        return Tables(
            whole=links.table("all_reduce", cut.replicas),
            across=links.table("all_reduce", cut.replicas // cut.shards),
            scatter=links.table("reduce_scatter", cut.shards),
            gather=links.table("all_gather", cut.shards),
        )


class Frame:
    """What the ways of all structures of an instance share.

    Args:
        instance: The question.
        tight: Whether memory may be short; if not, it is not looked at, nor what saves it.
    """

    def __init__(self, instance: Instance, *, tight: bool) -> None:
        cluster = instance.cluster
        self.instance, self.tight = instance, tight
        self.cut: Splits = splits(instance.global_batch, len(cluster.devices), instance.zero_levels)
        self.links = BestLinks(cluster)
        #: Collectives of any mesh; and by kind those of all of a mesh with one of its devices.
        self.tables = Tables.of(self.links, self.cut)
        self.joint = [Tables.of(BestLinks(cluster, kind.name), self.cut) for kind in cluster.kinds]
        overlap = max(kind.overlap for kind in cluster.kinds)
        self.gather_overlap = overlap * instance.execution.overlap_gather
        self.reduce_overlap = overlap * instance.execution.overlap_reduce
        self.exchange_overlap = overlap * instance.execution.overlap_exchange
        cores = Counter((d.node, d.core) for d in cluster.devices if d.core is not None)
        #: Of the devices that share a core, the part of one in what they wait for together.
        self.share = 1.0 / max(cores.values(), default=1)
        #: The same of its reductions, which the others' compute may hide altogether.
        self.reduce_share = 1.0 if self.share == 1.0 else 0.0
        self.equal = max(Counter(device.kind for device in cluster.devices).values())

    @cached_property
    def states(self) -> tuple[Floats, Floats]:
        """Bytes of a trainable and of a frozen element, not offloaded and offloaded (2, P)."""
        found = []
        for offload in (False, True):
            # Each level keeps a part whole and shards the rest; two meshes tell them apart.
            one, two = (
                np.array([self._element(level, offload, shards) for level in _LEVELS]).T
                for shards in (1, 2)
            )
            whole, sharded = 2.0 * two - one, 2.0 * (one - two)
            found.append(whole[:, self.cut.zero] + sharded[:, self.cut.zero] / self.cut.shards)
        return found[0], found[1]

    def _element(self, level: int, offload: bool, shards: int) -> tuple[float, float]:
        choice = GroupChoice(zero=level, offload=offload)
        mesh = Mesh(tuple(range(shards)), dp_shard=shards)
        trainable, frozen = (
            memory.states(self.instance, work, choice, mesh).total
            for work in (Work(params=1), Work(frozen_params=1))
        )
        return trainable, frozen

    def choices(self, structure: Structure) -> Iterator[GroupChoice]:
        """Recompute and offload; where memory is not looked at, only what costs no time."""
        modes = self.instance.recompute_options(structure.work)
        if "none" in modes and not self.tight:
            modes = ("none",)
        offload = self.instance.offered_offload if self.tight else (False,)
        for mode, away in product(modes, offload):
            yield GroupChoice(recompute=mode, offload=away)  # type: ignore[arg-type]  # a str

    def layouts(self, structure: Structure) -> list[Layout]:
        """Layouts of the tp axis.

        Running whole on several devices is no better than on few; but on one its gradients are
        reduced by the whole mesh, which a slow kind holds up.
        """
        offered = [degree for degree in self.instance.offered_tp if degree <= self.equal]
        few = [min(offered, default=1)]
        if few == [1] and len(self.joint) > 1 and self.equal > 1:
            few.append(2)
        return [
            *(Layout("replicate", degree, structure.work) for degree in few),
            *(
                layout
                for layout in (*structure.layouts, *structure.bordered)
                if layout.axis == "tp" and layout.degree in offered
            ),
        ]


def room(instance: Instance, kind: DeviceKind) -> float:
    """Bytes of a device that are left for a plan."""
    return kind.memory * (1.0 - instance.memory_margin) - kind.reserve
