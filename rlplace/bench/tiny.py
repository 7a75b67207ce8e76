"""Instances so small that all their plans can be looked at: the optimum is known."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice

import numpy as np

from rlplace.cluster.types import Cluster, DeviceKind, Link, Node
from rlplace.envs.builders.room import has_room
from rlplace.graph.types import Affine, Edge, OpGraph
from rlplace.plan.testing import chain, cluster, round_kind, transformer
from rlplace.plan.types import Instance
from rlplace.planners.exhaustive import all_plans

_SALT = 0x7197
#: Choices that an instance offers: (ZeRO levels, recompute modes).
_OFFERS = (
    ((0, 1, 2, 3), ("none", "full")),
    ((0, 3), ("none", "full")),
    ((0, 3), ("none",)),
    ((0, 2), ("none",)),
    ((0,), ("none", "full")),
)
#: Instances with more plans than this are drawn again.
_MOST_PLANS = 12_000


def tiny(index: int, seed: int = 0) -> Instance:
    """The instance of an index: three to six groups on two to four devices.

    Every second is on unequal devices, every third has links of unequal speed, and every fourth so
    little memory that few plans fit.
    """
    rng = np.random.default_rng([_SALT, seed, index])
    while True:
        graph = _graph(rng, index)
        devices = _cluster(rng, index, graph)
        zero_levels, modes = _OFFERS[int(rng.integers(len(_OFFERS)))]
        instance = Instance(
            graph,
            devices,
            int(rng.choice((2, 3, 4, 6, 8, 12))),
            memory_margin=0.0,
            zero_levels=zero_levels,
            recompute_modes=modes,
        )
        if has_room(instance) and _few(instance):
            return instance


def _few(instance: Instance) -> bool:
    return sum(1 for _ in islice(all_plans(instance), _MOST_PLANS + 1)) <= _MOST_PLANS


def _graph(rng: np.random.Generator, index: int) -> OpGraph:
    if index % 5 == 4:
        return transformer(1, int(rng.choice((256, 512))), degrees=(2,))
    flops = [float(10 ** rng.uniform(8.5, 10.0)) for _ in range(int(rng.integers(3, 7)))]
    floats = float(10 ** rng.uniform(4.0, 7.0))
    graph = chain(flops, floats=floats, params=int(10 ** rng.uniform(5.0, 7.7)))
    if len(flops) > 3 and rng.random() < 0.5:
        skip = Edge(0, len(flops) - 1, "out0", Affine(0.0, floats))
        graph = replace(graph, edges=tuple(sorted((*graph.edges, skip), key=_ends)))
    return graph


def _ends(edge: Edge) -> tuple[int, int]:
    return edge.src, edge.dst


def _cluster(rng: np.random.Generator, index: int, graph: OpGraph) -> Cluster:
    count = int(rng.integers(2, 5))
    # 16 bytes of states an element: at 0.6 of the model, it has to be cut or sharded.
    share = rng.uniform(0.6, 1.5) if index % 4 == 3 else 20.0
    memory = share * graph.params * 16 + 1e6
    overlap = float(rng.choice((0.0, 0.5, 0.9)))
    kinds = [round_kind("fast", memory=memory, overlap=overlap)]
    if index % 2:
        kinds.append(round_kind("slow", rng.uniform(0.2, 0.8), memory=memory, overlap=overlap))
    first = int(rng.integers(1, count))
    members = [_drawn(rng, kinds, size) for size in (first, count - first)]
    fast, slow = Link(10 ** rng.uniform(9.5, 11.5), 1e-6), Link(10 ** rng.uniform(8.5, 10.5), 1e-5)
    if index % 3:
        return cluster([[*members[0], *members[1]]], intra=fast)
    made = cluster(members, intra=fast, nic=slow)
    uneven = Link(fast.bandwidth / 4, 5e-6)
    return replace(made, nodes=(made.nodes[0], Node(1, uneven, slow)))


def _drawn(rng: np.random.Generator, kinds: list[DeviceKind], size: int) -> list[DeviceKind]:
    return [kinds[int(rng.integers(len(kinds)))] for _ in range(size)]
