"""An instance as arrays for the encoder: every number is a ratio or the logarithm of one."""

from __future__ import annotations

from itertools import combinations

import numpy as np

from rlplace.cluster.types import Cluster, Link
from rlplace.envs.types import FloatArray, InstanceView, IntArray
from rlplace.plan.types import Instance

_SMALL = 1e-9
#: With more hosts than this, a host is joined to its neighbours and a few others only.
_ALL_PAIRS = 12

OP_FEATURE_NAMES = (
    "log(share of FLOPs * groups)",
    "log(share of moved bytes * groups)",
    "log(share of parameters * groups)",
    "log(share of saved bytes * groups)",
    "log(arithmetic intensity over the cluster's balance)",
    "log(seconds at the best device, over the bound)",
    "log(states over the memory of a device)",
    "log(saved bytes of a sample over the memory of a device)",
    "log(bytes into the group over the link of a host, over the bound)",
    "sharded layouts, over three",
    "position from 0 to 1",
    "whether it holds parameters",
)
DEVICE_FEATURE_NAMES = (
    "log(peak over the mean)",
    "log(memory over the mean)",
    "log(memory bandwidth over the mean)",
    "log(link inside over the cluster's best link)",
    "log(link outside over the link inside)",
    "log2(devices) / 3",
    "log(states of the whole model over the memory of the host)",
    "share of devices that share a core with another",
)


def instance_view(instance: Instance, bound: float) -> InstanceView:
    """The constant part of an episode.

    Args:
        instance: The question.
        bound: Proved limit of its step time (seconds), the unit of durations.
    """
    edges, edge_features = _op_edges(instance, bound)
    pairs, pair_features = _host_pairs(instance.cluster)
    return InstanceView(
        op_features=_op_features(instance, bound),
        op_edges=edges,
        op_edge_features=edge_features,
        device_features=_host_features(instance),
        device_edges=pairs,
        device_edge_features=pair_features,
        globals=_globals(instance, bound),
    )


def _op_features(instance: Instance, bound: float) -> FloatArray:
    graph, cluster, size = instance.graph, instance.cluster, instance.bytes
    batch, count = float(instance.global_batch), len(graph.groups)
    works = [graph.structure(index).work for index in range(count)]
    flops = np.array([w.flops(batch) + w.backward_flops(batch) for w in works])
    moved = np.array([w.moved(batch) + w.backward_moved(batch) for w in works]) * size.activation
    params = np.array([float(w.params + w.frozen_params) for w in works])
    saved = np.array([w.saved(1.0) * size.activation + w.saved_bytes(1.0) for w in works])
    kinds = [cluster.kind(device.index) for device in cluster.devices]
    peak = np.array([kind.peak_flops[size.compute] for kind in kinds])
    bandwidth = np.array([kind.bandwidth for kind in kinds])
    memory = float(np.mean([kind.memory for kind in kinds]))
    states = params * (size.weight + size.gradient + instance.optimizer_bytes)
    into = np.array(
        [f(batch) * size.activation + o(batch) for f, o in graph.crossings[:count]]
    ) / _slowest_link(cluster)
    layouts = [len({lay.degree for lay in graph.structure(i).layouts}) / 3.0 for i in range(count)]
    columns = (
        _share(flops),
        _share(moved),
        _share(params),
        _share(saved),
        _log(flops / np.maximum(moved, 1.0), float(peak.mean() / bandwidth.mean())),
        _log(flops / peak.max() + moved / bandwidth.max(), bound * len(kinds)),
        _log(states, memory),
        _log(saved, memory),
        _log(into, bound),
        np.array(layouts),
        np.linspace(0.0, 1.0, count),
        (params > 0.0).astype(float),
    )
    return np.stack(columns, axis=1).astype(np.float32)


def _op_edges(instance: Instance, bound: float) -> tuple[IntArray, FloatArray]:
    graph, batch = instance.graph, float(instance.global_batch)
    ends = np.array([(edge.src, edge.dst) for edge in graph.edges], np.int64).reshape(-1, 2)
    size = np.array(
        [
            edge.floats(batch) * instance.bytes.activation + edge.other_bytes(batch)
            for edge in graph.edges
        ]
    )
    length = (ends[:, 1] - ends[:, 0]) / max(1, len(graph.groups))
    seconds = _log(size / _slowest_link(instance.cluster), bound)
    columns = (seconds, length, (ends[:, 1] - ends[:, 0] > 1).astype(float))
    return ends.T.copy(), np.stack(columns, axis=1).astype(np.float32)


def _host_features(instance: Instance) -> FloatArray:
    cluster, dtype = instance.cluster, instance.bytes.compute
    every = [cluster.kind(device.index) for device in cluster.devices]
    mean = {
        "peak": float(np.mean([kind.peak_flops[dtype] for kind in every])),
        "memory": float(np.mean([kind.memory for kind in every])),
        "bandwidth": float(np.mean([kind.bandwidth for kind in every])),
    }
    best = max(node.intra.bandwidth for node in cluster.nodes)
    each = instance.bytes.weight + instance.bytes.gradient + instance.optimizer_bytes
    states = float(instance.graph.params * each)
    rows = []
    for node in cluster.nodes:
        own = [device for device in cluster.devices if device.node == node.index]
        kinds = [cluster.kind(device.index) for device in own]
        outside = (node.nic or node.intra).bandwidth
        cores = [device.core for device in own if device.core is not None]
        shared = sum(cores.count(core) > 1 for core in cores) / len(own)
        memory = float(sum(kind.memory for kind in kinds))
        rows.append(
            (
                np.log(np.mean([kind.peak_flops[dtype] for kind in kinds]) / mean["peak"]),
                np.log(np.mean([kind.memory for kind in kinds]) / mean["memory"]),
                np.log(np.mean([kind.bandwidth for kind in kinds]) / mean["bandwidth"]),
                np.log(node.intra.bandwidth / best),
                np.log(outside / node.intra.bandwidth),
                np.log2(len(own)) / 3.0,
                np.log(max(states, 1.0) / memory),
                shared,
            )
        )
    return np.array(rows, np.float32)


def _host_pairs(cluster: Cluster) -> tuple[IntArray, FloatArray]:
    """Both directions of each pair; beyond `_ALL_PAIRS` hosts only at distances 1, 2, 4, ..."""
    hosts = len(cluster.nodes)
    pairs = [
        (a, b)
        for a, b in combinations(range(hosts), 2)
        if hosts <= _ALL_PAIRS or (b - a) & (b - a - 1) == 0
    ]
    best = max(node.intra.bandwidth for node in cluster.nodes)
    rows = []
    for a, b in pairs:
        link = _between(cluster, a, b)
        same = cluster.nodes[a].intra == cluster.nodes[b].intra
        rows.append((np.log(link.bandwidth / best), np.log10(link.latency / 1e-5), float(same)))
    ends = np.array(pairs, np.int64).reshape(-1, 2)
    both = np.concatenate([ends, ends[:, ::-1]]).T.copy()
    features = np.array(rows, np.float32).reshape(-1, 3)
    return both, np.concatenate([features, features])


def _between(cluster: Cluster, a: int, b: int) -> Link:
    first = next(device.index for device in cluster.devices if device.node == a)
    second = next(device.index for device in cluster.devices if device.node == b)
    return cluster.link(first, second)


def _globals(instance: Instance, bound: float) -> FloatArray:
    graph, cluster, size = instance.graph, instance.cluster, instance.bytes
    memory = float(sum(cluster.kind(device.index).memory for device in cluster.devices))
    states = graph.params * (size.weight + size.gradient + instance.optimizer_bytes)
    peak = sum(cluster.kind(d.index).peak_flops[size.compute] for d in cluster.devices)
    flops = graph.model_flops(1.0)
    traffic = graph.params * size.gradient / _slowest_link(cluster)
    values = (
        np.log(max(states, 1.0) / memory),
        np.log(max(flops * instance.global_batch / peak, _SMALL) / bound),
        np.log(max(traffic, _SMALL) / bound),
        np.log2(len(graph.groups)) / 8.0,
        np.log2(len(cluster.devices)) / 6.0,
        np.log2(instance.global_batch) / 12.0,
        np.log2(len(cluster.islands)),
        float(instance.attention == "math"),
    )
    return np.array(values, np.float32)


def _slowest_link(cluster: Cluster) -> float:
    links = [node.intra for node in cluster.nodes] + [n.nic for n in cluster.nodes if n.nic]
    return min(link.bandwidth for link in links)


def _share(values: np.ndarray) -> np.ndarray:
    mean = max(float(values.mean()), _SMALL)
    return np.asarray(np.maximum(_log(values, mean), -8.0))


def _log(values: np.ndarray, unit: float) -> np.ndarray:
    ratio = np.maximum(values / max(unit, 1e-30), _SMALL)
    return np.asarray(np.clip(np.log(ratio), -12.0, 12.0))
