"""The least seconds that a collective takes among any so many devices of a cluster."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from rlplace.cluster.types import Cluster, CollectiveCurve, CollectiveKind, Device, Link
from rlplace.cost.collectives import SWITCH_SHARE, Ring, seconds

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@dataclass
class BestLinks:
    """Collectives on the best link of a cluster, which no group of as many ranks can beat.

    A group that fits in no node has a link between nodes, and is no faster than that one. Of the
    steps that an algorithm takes, as many are over some link as there would be if all ranks were
    in one node or each in a node of its own, whichever are fewer; each costs the least latency at
    least. Where a switch adds up, an all-reduce may mix links of either sort, and is costed as if
    it reached all of the best one's speed. Measured curves belong to a number of ranks.

    A group with a device of a given kind is no faster than the best link of such a device, for its
    ring comes by there.

    Args:
        cluster: The device graph.
        kind: Name of a kind of which the group has a device; empty for any group.
    """

    cluster: Cluster
    kind: str = ""
    _rings: dict[int, tuple[Ring, ...]] = field(default_factory=dict)

    def seconds(self, kind: CollectiveKind, size: float, ranks: int) -> float:
        """Least seconds of a collective on a tensor of `size` bytes."""
        return min(seconds(kind, size, ring) for ring in self.rings(ranks))

    def table(self, kind: CollectiveKind, ranks: Ints) -> Table:
        """The same for many numbers of ranks at once (P,)."""
        lines: dict[int, list[tuple[float, float]]] = {}
        curves: list[tuple[npt.NDArray[np.bool_], CollectiveCurve]] = []
        distinct, index = np.unique(ranks, return_inverse=True)
        for own in distinct.tolist():
            lines[own] = [(0.0, 0.0)]
            if own == 1:
                continue
            rings = self.rings(own)
            if (curve := next((c for c in rings[0].curves if c.kind == kind), None)) is not None:
                curves.append((ranks == own, curve))
                continue
            for ring in rings:
                seconds(kind, 1.0, ring)  # fills in `lines`
            lines[own] = [line for ring in rings for line in ring.lines[kind]]
        most = max(map(len, lines.values()))
        # Repeating a line changes no minimum.
        full = np.array([(lines[n] * most)[:most] for n in distinct.tolist()])
        return Table(full[index, :, 0].T, full[index, :, 1].T, tuple(curves))

    def rings(self, ranks: int) -> tuple[Ring, ...]:
        """What is at least as good as any group of `ranks` devices, one or the other."""
        if ranks not in self._rings:
            self._rings[ranks] = self._best(ranks)
        return self._rings[ranks]

    def _best(self, ranks: int) -> tuple[Ring, ...]:
        if ranks == 1:
            return (Ring(1),)
        curves = tuple(curve for curve in self.cluster.curves if curve.ranks == ranks)
        launch = min(kind.collective_launch for kind in self.cluster.kinds)
        inside, between = self._links
        spread = Ring(ranks, 1, ranks, None, between, curves, launch)
        if ranks > self._largest:
            return (spread,)
        together = Ring(ranks, ranks, 1, inside, None, curves, launch)
        return (together, replace(spread, inter=inside, lines={}))

    @cached_property
    def _own(self) -> list[Device]:
        """The devices of which a group has one."""
        return [d for d in self.cluster.devices if self.kind in ("", d.kind)]

    @cached_property
    def _largest(self) -> int:
        """Devices of the largest node that has such a device."""
        sizes = self.cluster.node_sizes
        return max(sizes[device.node] for device in self._own)

    @cached_property
    def _links(self) -> tuple[Link | None, Link | None]:
        """The best of all links of such devices, and of those between nodes."""
        ranks = {device.index for device in self._own}
        own = [link for a, b, link in self.cluster.overrides if a in ranks or b in ranks]
        nodes = [self.cluster.nodes[number] for number in {device.node for device in self._own}]
        nics = [node.nic for node in nodes if node.nic is not None]
        return self._ideal([*(node.intra for node in nodes), *nics, *own]), self._ideal(nics + own)

    def _ideal(self, links: list[Link]) -> Link | None:
        """A link as fast as the fastest and as near as the nearest of the cluster."""
        if not links:
            return None
        every = [link for _, _, link in self.cluster.overrides]
        for node in self.cluster.nodes:
            every += [node.intra] if node.nic is None else [node.intra, node.nic]
        reduces = any(link.reduces for link in every)
        speed = max(link.speed for link in links) / (SWITCH_SHARE if reduces else 1.0)
        return Link(speed, min(link.latency for link in every), reduces=reduces)


@dataclass(frozen=True, slots=True)
class Table:
    """Seconds of a collective for P numbers of ranks: the least of K lines, or a measured curve.

    Args:
        fixed: Seconds of nothing (K, P).
        per_byte: Seconds of a byte (K, P).
        curves: Which of the P have which curve.
    """

    fixed: Floats
    per_byte: Floats
    curves: tuple[tuple[npt.NDArray[np.bool_], CollectiveCurve], ...]

    def seconds(self, size: float | Floats, bucket: float | Floats = 0.0) -> Floats:
        """Of tensors of `size` bytes, one or P of them, `bucket` bytes at a time (0: all at once).

        A tensor that does not fill a bucket takes its part of one.
        """
        if np.any(bucket):
            return size / bucket * self.seconds(bucket)
        found: Floats = np.where(size > 0.0, (self.fixed + self.per_byte * size).min(axis=0), 0.0)
        for places, curve in self.curves:
            sizes = np.broadcast_to(size, found.shape)[places].tolist()
            found[places] = [curve.seconds(own) if own > 0.0 else 0.0 for own in sizes]
        return found
