"""Small instances and random plans with round figures, for tests and benchmarks.

Durations can be worked out by hand: a `round_kind` device does one TFLOP/s and one TB/s at any
size, without launches, and a group of `chain` does exactly the FLOPs that it is told.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import isqrt

import numpy as np

from rlplace.cluster.types import Cluster, CollectiveCurve, Device, DeviceKind, Link, Node
from rlplace.graph.types import Affine, Collective, Edge, Group, Layout, OpGraph, Structure, Work
from rlplace.plan.check import legal_micro_batches
from rlplace.plan.types import GroupChoice, Instance, Mesh, Plan, Stage
from rlplace.plan.uniform import make_plan

TERA = 1e12
#: Links of `cluster` by default: 100 GB/s inside a node, 10 GB/s between nodes.
INTRA = Link(100e9, 1e-6, "intra")
NIC = Link(10e9, 5e-6, "nic")


def round_kind(
    name: str = "round",
    speed: float = 1.0,
    memory: float = 80e9,
    overlap: float = 0.0,
    reserve: float = 0.0,
) -> DeviceKind:
    """A device without overheads: `speed` TFLOP/s in every dtype and TB/s of memory bandwidth."""
    peaks = dict.fromkeys(("fp32", "bf16", "fp16"), speed * TERA)
    return DeviceKind(
        name, int(memory), peaks, speed * TERA, 0.0, 1.0, 0.0, 1.0, overlap, int(reserve)
    )


def cluster(
    nodes: Sequence[Sequence[DeviceKind]],
    *,
    intra: Link = INTRA,
    nic: Link = NIC,
    cores: Sequence[int] | None = None,
    curves: tuple[CollectiveCurve, ...] = (),
) -> Cluster:
    """Nodes of devices with one link inside and one between all nodes.

    Args:
        nodes: The kind of each device, node by node.
        intra: Link inside every node.
        nic: Link of every node to the others.
        cores: Core of each device, over all nodes; by default each has its own.
        curves: Measured collectives.
    """
    kinds: dict[str, DeviceKind] = {}
    devices: list[Device] = []
    for number, members in enumerate(nodes):
        for kind in members:
            kinds[kind.name] = kind
            core = None if cores is None else cores[len(devices)]
            devices.append(Device(len(devices), kind.name, number, core))
    hosts = tuple(
        Node(number, intra, nic if len(nodes) > 1 else None) for number in range(len(nodes))
    )
    return Cluster(tuple(devices), hosts, tuple(kinds.values()), curves=curves, name="synthetic")


def chain(flops: Sequence[float], *, floats: float = 0.0, params: int = 0) -> OpGraph:
    """A chain of groups without memory traffic; each saves its input and its output.

    Args:
        flops: Forward FLOPs of each group a sample; backward does twice as many.
        floats: Elements a sample of the tensor between neighbours.
        params: Trainable elements of each group.
    """
    structures = [
        Structure(
            str(index),
            Work(
                flops=Affine(0.0, size),
                backward_flops=Affine(0.0, 2 * size),
                matmuls=1,
                saved=Affine(0.0, 2 * floats),
                params=params,
            ),
        )
        for index, size in enumerate(flops)
    ]
    groups = [Group(index, f"layer.{index}", index) for index in range(len(flops))]
    edges = _chain_edges(len(groups), floats)
    return OpGraph("chain", tuple(groups), edges, tuple(structures))


def transformer(
    layers: int = 4,
    hidden: int = 256,
    *,
    seq_len: int = 128,
    vocab: int = 1024,
    degrees: Sequence[int] = (2, 4),
    tied: bool = False,
) -> OpGraph:
    """Embedding, layers of attention and MLP, head; Megatron's layouts at each of `degrees`.

    Args:
        layers: Transformer layers, two groups each.
        hidden: Width; the MLP is four times as wide.
        seq_len: Tokens of a sample.
        vocab: Rows of the embedding.
        degrees: Tp degrees with a sharded layout.
        tied: Whether the head uses the embedding's table.
    """
    token = seq_len * hidden
    table = vocab * hidden
    works = (
        Work(
            moved=Affine(0.0, 3 * token),
            backward_moved=Affine(table, 3 * token),
            kernels=2,
            saved_bytes=Affine(0.0, 8 * seq_len),
            params=table,
        ),
        _dense(4 * hidden * hidden, 4, token, seq_len, extra_flops=2 * seq_len * token),
        _dense(8 * hidden * hidden, 2, 3 * token, seq_len),
        _dense(table, 1, token + seq_len * vocab, seq_len),
    )
    structures = tuple(
        Structure(name, work, tuple(_sharded(work, degree, token) for degree in degrees))
        for name, work in zip(("embedding", "attention", "mlp", "head"), works, strict=True)
    )
    names = [
        "embedding",
        *(f"layers.{i}.{half}" for i in range(layers) for half in ("attn", "mlp")),
    ]
    kinds = [0, *([1, 2] * layers), 3]
    groups = tuple(
        Group(index, name, kind, params=("table",) if tied and kind in (0, 3) else ())
        for index, (name, kind) in enumerate(zip([*names, "head"], kinds, strict=True))
    )
    return OpGraph(
        "transformer",
        groups,
        _chain_edges(len(groups), token),
        structures,
        tokens_per_sample=seq_len,
        tied=(("table", table),) if tied else (),
    )


def random_plan(instance: Instance, rng: np.random.Generator) -> Plan:
    """A legal plan: random stages on random runs of devices in random shapes, random choices."""
    devices = rng.permutation(len(instance.cluster.devices))
    groups = len(instance.graph.groups)
    stages = int(rng.integers(1, min(len(devices), groups) + 1))
    cuts = np.sort(rng.choice(np.arange(1, groups), stages - 1, replace=False))
    borders = np.sort(rng.choice(np.arange(1, len(devices)), stages - 1, replace=False))
    counts = legal_micro_batches(instance.global_batch, 1)
    count = int(rng.choice(counts))
    bounds = [0, *(int(cut) for cut in cuts), groups]
    made = []
    for index, members in enumerate(np.split(devices, borders)):
        mesh = _random_mesh(instance, tuple(int(d) for d in members), count, rng)
        span = range(bounds[index], bounds[index + 1])
        choices = tuple(_random_choice(instance, group, mesh.tp, rng) for group in span)
        made.append(Stage(span.start, span.stop, mesh, choices))
    schedule = str(rng.choice(("1f1b", "gpipe")))
    return make_plan(instance, tuple(made), count, schedule)


def _random_mesh(
    instance: Instance, devices: tuple[int, ...], count: int, rng: np.random.Generator
) -> Mesh:
    """As many of the devices as a random legal shape takes; tp only within one kind."""
    micro_batch = instance.global_batch // count
    ordered = sorted(devices, key=lambda device: (instance.cluster.devices[device].kind, device))
    shapes = []
    for tp in (1, 2, 4):
        for dp in (d for d in range(1, len(devices) // tp + 1) if micro_batch % d == 0):
            mesh = Mesh(tuple(ordered[: dp * tp]), 1, dp, 1, tp)
            kinds = [{instance.cluster.devices[d].kind for d in g} for g in mesh.tp_groups()]
            if all(len(own) == 1 for own in kinds):
                shapes.append(mesh)
    mesh = shapes[int(rng.integers(len(shapes)))]
    across = next(d for d in range(isqrt(mesh.dp_shard), 0, -1) if mesh.dp_shard % d == 0)
    if rng.random() < 0.5:
        mesh = replace(mesh, dp_replicate=across, dp_shard=mesh.dp_shard // across)
    return mesh


def _random_choice(
    instance: Instance, group: int, tp: int, rng: np.random.Generator
) -> GroupChoice:
    layouts = instance.graph.structure(group).layouts_at(tp)
    layout = layouts[int(rng.integers(len(layouts)))].name
    zero = int(rng.choice(instance.zero_levels))
    return GroupChoice(layout, zero, "full" if rng.random() < 0.5 else "none")


def _dense(weight: int, matmuls: int, moved: int, seq_len: int, extra_flops: int = 0) -> Work:
    """Matmuls with `weight` elements in all, applied to every token of a sample."""
    flops = Affine(0.0, 2 * weight * seq_len + extra_flops)
    return Work(
        flops=flops,
        backward_flops=flops * 2,
        matmuls=matmuls,
        kernels=matmuls + 4,
        moved=Affine(weight, 3 * moved),
        backward_moved=Affine(2 * weight, 6 * moved),
        saved=Affine(0.0, 2 * moved),
        transient=Affine(0.0, moved),
        params=weight,
    )


def _sharded(work: Work, degree: int, boundary: float) -> Layout:
    """Everything cut by `degree`, with an all-reduce of the boundary in each direction."""
    part = 1.0 / degree
    local = replace(
        work,
        flops=work.flops * part,
        backward_flops=work.backward_flops * part,
        moved=work.moved * part,
        backward_moved=work.backward_moved * part,
        saved=work.saved * part,
        params=work.params // degree,
    )
    size = Affine(0.0, boundary)
    exchanges = (
        Collective("all_reduce", "forward", size),
        Collective("all_reduce", "backward", size),
    )
    return Layout("shard", degree, local, exchanges)


def _chain_edges(groups: int, floats: float) -> tuple[Edge, ...]:
    size = Affine(0.0, floats)
    return tuple(Edge(index, index + 1, f"t{index}", size) for index in range(groups - 1))
