"""WHERE: the device graph. Bandwidths are bytes/s, latencies seconds, memory bytes."""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Literal


@dataclass(frozen=True, slots=True)
class DeviceKind:
    """What devices of one kind can do; datasheet figures and a few constants of efficiency.

    Args:
        name: Name in the catalogue, as ``A100-80``.
        memory: Bytes of device memory.
        peak_flops: Dense matmul peak by dtype (``fp32``, ``tf32``, ``bf16``, ``fp16``, ``fp8``);
            a dtype that is missing is not supported.
        bandwidth: Memory bandwidth, bytes/s.
        launch_overhead: Seconds that one kernel costs however small it is.
        max_efficiency: Share of the peak that a very large matmul reaches.
        half_flops: FLOPs of the matmul that reaches half of `max_efficiency`.
        memory_efficiency: Share of the bandwidth that memory-bound ops reach.
        overlap: Share of a collective that can hide behind compute (0 where the same cores do
            both, as on a CPU).
        reserve: Bytes that the context and the allocator take away.
        sms: Multiprocessors over which the tiles of a matmul are dealt; 0 where its shape does not
            matter (a CPU).
        half_depth: Length of the sums of the matmul that reaches half of `max_efficiency`.
        attention_efficiency: Share of the peak that a flash attention kernel reaches.
        host_bandwidth: Bytes/s in one direction between a device and the memory of its host; 0
            where it has none of its own.
        collective_launch: Seconds that a collective or a message costs however small and near.
        conv_efficiency: Speed of a convolution, relative to a matmul of as many FLOPs.
        stream_efficiency: Share of the bandwidth that the optimizer and sums of gradients reach,
            which do little beside reading and writing; 0 where that is `memory_efficiency`.
    """

    name: str
    memory: int
    peak_flops: dict[str, float]
    bandwidth: float
    launch_overhead: float = 5e-6
    max_efficiency: float = 0.75
    half_flops: float = 2e9
    memory_efficiency: float = 0.8
    overlap: float = 0.9
    reserve: int = 0
    sms: int = 0
    half_depth: float = 0.0
    attention_efficiency: float = 0.5
    host_bandwidth: float = 0.0
    collective_launch: float = 0.0
    conv_efficiency: float = 1.0
    stream_efficiency: float = 0.0

    @property
    def stream(self) -> float:
        """Bytes/s at which the optimizer and sums of gradients read and write."""
        return self.bandwidth * (self.stream_efficiency or self.memory_efficiency)


#: How the devices of a node share a link: each has its bandwidth towards any other (a switch),
#: an equal part of it towards every other (a full mesh), or towards one neighbour in each dimension
#: of a hypercube (the hybrid cube mesh of DGX-1).
Fabric = Literal["switch", "mesh", "cube"]


@dataclass(frozen=True, slots=True)
class Link:
    """A connection, inside a node that of one device, between nodes that of a whole node.

    Args:
        bandwidth: Bytes/s on the wire in one direction.
        latency: Seconds a message or a step of a collective.
        name: What to call it.
        efficiency: Share of the bandwidth that a large collective reaches.
        nics: Equal parts that it consists of; what one device sends to one other takes one part.
        reduces: Its switch adds up what the devices send (NVLink SHARP, InfiniBand SHARP).
        fabric: How the devices of a node share it.
        relay: Seconds more that a step of a collective takes from node to node, for a host has to
            pass on what arrives; 0 where NICs do so alone.
    """

    bandwidth: float
    latency: float
    name: str = ""
    efficiency: float = 1.0
    nics: int = 1
    reduces: bool = False
    fabric: Fabric = "switch"
    relay: float = 0.0

    @property
    def speed(self) -> float:
        """Bytes/s that a large collective reaches in one direction."""
        return self.bandwidth * self.efficiency


@dataclass(frozen=True, slots=True)
class Device:
    """One device.

    Args:
        index: Position in `Cluster.devices`, its global rank.
        kind: Name of its kind.
        node: Index of its node.
        core: What executes it; devices of a node with the same core take turns (CPU ranks that
            share a core). None means a core of its own.
    """

    index: int
    kind: str
    node: int
    core: int | None = None


@dataclass(frozen=True, slots=True)
class Node:
    """A host.

    Args:
        index: Position in `Cluster.nodes`.
        intra: What joins its devices.
        nic: What the whole host has towards the others.
        bridge: Devices behind one host bridge, neighbours in the order of ranks; they share one
            such link towards those behind another. 0 where no bridge is shared.
    """

    index: int
    intra: Link
    nic: Link | None = None
    bridge: int = 0


CollectiveKind = Literal[
    "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "p2p"
]


@dataclass(frozen=True, slots=True)
class CollectiveCurve:
    """Measured cost of a collective among `ranks` ranks: ``latency + seconds_per_byte * bytes``.

    `bytes` is the size of the whole tensor, as in `rlplace.graph.types.Collective`. Where a line
    is too coarse (a byte costs more beyond the caches than within), `points` says more.

    Args:
        kind: The collective.
        ranks: Size of the group.
        latency: Seconds of an empty one, of the line that fits best.
        seconds_per_byte: Slope of that line.
        points: Measured (bytes, seconds), at least two or none; sizes ascend, times do not fall.
    """

    kind: CollectiveKind
    ranks: int
    latency: float
    seconds_per_byte: float
    points: tuple[tuple[float, float], ...] = ()

    def seconds(self, size: float) -> float:
        """Seconds for a whole tensor of `size` bytes.

        Between two points along a straight line, below the first as long as the first, beyond
        the last with the slope of the last two; without points, the line.
        """
        if not self.points:
            return self.latency + self.seconds_per_byte * size
        after = bisect_left(self.points, (size,))
        if after == 0:
            return self.points[0][1]
        after = min(after, len(self.points) - 1)
        (size_0, time_0), (size_1, time_1) = self.points[after - 1], self.points[after]
        return time_0 + (time_1 - time_0) * (size - size_0) / (size_1 - size_0)


@dataclass(frozen=True)
class Cluster:
    """The device graph.

    Args:
        devices: In the order of their global ranks.
        nodes: Hosts, with the links inside and out.
        kinds: The device kinds that occur.
        overrides: Links of single pairs of devices (smaller index first).
        curves: Measured collectives; where given for a kind, they replace the link model.
        name: How the cluster was asked for.
    """

    devices: tuple[Device, ...]
    nodes: tuple[Node, ...]
    kinds: tuple[DeviceKind, ...]
    overrides: tuple[tuple[int, int, Link], ...] = ()
    curves: tuple[CollectiveCurve, ...] = ()
    name: str = ""

    @cached_property
    def _kinds(self) -> dict[str, DeviceKind]:
        return {kind.name: kind for kind in self.kinds}

    @cached_property
    def _overrides(self) -> dict[tuple[int, int], Link]:
        return {(a, b): link for a, b, link in self.overrides}

    def kind(self, device: int) -> DeviceKind:
        """The kind of a device."""
        return self._kinds[self.devices[device].kind]

    def link(self, a: int, b: int) -> Link:
        """The link between two devices: an override, the node's own, or the slower NIC."""
        if (override := self._overrides.get((min(a, b), max(a, b)))) is not None:
            return override
        node_a, node_b = (self.nodes[self.devices[device].node] for device in (a, b))
        if node_a.index == node_b.index:
            return node_a.intra
        assert node_a.nic is not None
        assert node_b.nic is not None
        return min(node_a.nic, node_b.nic, key=lambda link: (link.speed, -link.latency))

    @cached_property
    def places(self) -> tuple[int, ...]:
        """Position of each device among those of its node."""
        seen: Counter[int] = Counter()
        found = []
        for device in self.devices:
            found.append(seen[device.node])
            seen[device.node] += 1
        return tuple(found)

    @cached_property
    def node_sizes(self) -> dict[int, int]:
        """Devices of each node."""
        return dict(Counter(device.node for device in self.devices))

    def bridge(self, device: int) -> int:
        """Number of the host bridge of a device within its node; 0 where no bridge is shared."""
        size = self.nodes[self.devices[device].node].bridge
        return self.places[device] // size if size else 0

    @cached_property
    def islands(self) -> tuple[tuple[int, ...], ...]:
        """Devices of the same kind in nodes with the same links; nodes stay whole inside one."""
        found: dict[tuple[object, ...], list[int]] = {}
        for device in self.devices:
            node = self.nodes[device.node]
            key = (device.kind, node.intra, node.nic, node.bridge)
            found.setdefault(key, []).append(device.index)
        return tuple(tuple(members) for members in found.values())

    @cached_property
    def fingerprint(self) -> str:
        """Hash of everything but the name."""
        text = repr(replace(self, name=""))
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @staticmethod
    def parse(text: str) -> Cluster:
        """A cluster from its short form, as ``4x8xA100-80`` (see `rlplace.cluster.load`)."""
        from rlplace.cluster.load import parse_cluster

        return parse_cluster(text)

    @staticmethod
    def load(path: str | Path) -> Cluster:
        """A cluster from a YAML file (see `rlplace.cluster.load`)."""
        from rlplace.cluster.load import load_cluster

        return load_cluster(path)


@dataclass(frozen=True)
class Discovery:
    """What `discover` found, with how long it took and what was said about the machine."""

    cluster: Cluster
    seconds: float
    notes: tuple[str, ...] = field(default_factory=tuple)
