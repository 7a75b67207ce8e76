"""How long a profile's own network takes: measured curves, or the links of the cluster."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, Protocol

from rlplace.cluster.types import Cluster
from rlplace.cost.collectives import point_to_point, ring, seconds
from rlplace.errors import InputError
from rlplace.plan.types import Mesh

Kind = Literal["all_reduce", "all_gather", "reduce_scatter"]


class Network(Protocol):
    """Seconds of what passes between the devices of a plan. Implementations are pure."""

    def transfer(self, cluster: Cluster, source: Mesh, target: Mesh, size: float) -> float:
        """Seconds to send `size` bytes of a micro-batch (over all replicas) to the next stage."""
        ...

    def collective(
        self, kind: Kind, cluster: Cluster, mesh: Mesh, members: tuple[int, ...], size: float
    ) -> float:
        """Seconds of a collective on `size` bytes of states, among replicas of a shard.

        All shards of the mesh do the same at the same time.
        """
        ...


@dataclass(frozen=True)
class ClusterNetwork:
    """The links and the measured curves of the cluster."""

    def transfer(self, cluster: Cluster, source: Mesh, target: Mesh, size: float) -> float:
        """See `Network.transfer`."""
        senders, receivers = source.devices[:: source.tp], target.devices[:: target.tp]
        return point_to_point(cluster, senders, receivers, size)

    def collective(
        self, kind: Kind, cluster: Cluster, mesh: Mesh, members: tuple[int, ...], size: float
    ) -> float:
        """See `Network.collective`."""
        return seconds(kind, size, ring(cluster, members, mesh.devices))


@dataclass(frozen=True, slots=True)
class BandwidthFit:
    """Bandwidth that grows with the message: ``c2 x**2 + c1 x + c0`` GB/s, x = log2(megabytes).

    Outside its range a parabola says nothing: messages below a megabyte have the bandwidth of one
    of that, and beyond its summit the summit holds.
    """

    c2: float
    c1: float
    c0: float

    def seconds(self, size: float) -> float:
        """Seconds for `size` bytes."""
        if size <= 0.0:
            return 0.0
        place = math.log2(size / 1e6)
        if self.c2 < 0.0:
            place = min(place, -self.c1 / (2 * self.c2))
        place = max(place, 0.0)
        return size / ((self.c2 * place**2 + self.c1 * place + self.c0) * 1e9)


@dataclass(frozen=True)
class FittedNetwork:
    """Bandwidth fits between nodes, by who sends and who receives.

    Args:
        fits: By (kind that sends, its devices of a node that do, kind that receives, likewise).
        bucket: Bytes of a bucket of gradients; buckets are reduced one after the other.
    """

    fits: Mapping[tuple[str, int, str, int], BandwidthFit]
    bucket: float = 5e8

    def transfer(self, cluster: Cluster, source: Mesh, target: Mesh, size: float) -> float:
        """See `Network.transfer`; all devices of a tp group send together, replicas at once."""
        count = max(source.dp, target.dp)
        senders, receivers = source.tp_groups(), target.tp_groups()
        return max(
            self._fit(
                cluster,
                senders[pair * len(senders) // count],
                receivers[pair * len(receivers) // count],
            ).seconds(size / count)
            for pair in range(count)
        )

    def collective(
        self, kind: Kind, cluster: Cluster, mesh: Mesh, members: tuple[int, ...], size: float
    ) -> float:
        """See `Network.collective`: a ring, as fast as its slowest pair of neighbours.

        The tp ranks of a replica sit on one node, and send their shards over its NICs together.
        """
        ranks = len(members)
        if ranks == 1 or size <= 0.0:
            return 0.0
        replicas = [group for group in mesh.tp_groups() if not {*group}.isdisjoint(members)]
        fits = {self._fit(cluster, a, b) for a, b in pairwise((*replicas, replicas[0]))}
        passes = 2 if kind == "all_reduce" else 1
        full, rest = divmod(size, self.bucket)
        part = mesh.tp / ranks
        return max(
            passes
            * (ranks - 1)
            * (full * fit.seconds(self.bucket * part) + fit.seconds(rest * part))
            for fit in fits
        )

    def _fit(
        self, cluster: Cluster, source: tuple[int, ...], target: tuple[int, ...]
    ) -> BandwidthFit:
        kinds = [cluster.devices[devices[0]].kind for devices in (source, target)]
        key = (kinds[0], len(source), kinds[1], len(target))
        if key not in self.fits:
            rule = "the profile has no bandwidth for these senders and receivers"
            raise InputError("link", key, rule, sorted(self.fits))
        return self.fits[key]
