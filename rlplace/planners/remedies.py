"""Where nothing fits: the smallest changes that would."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from rlplace.cluster.types import Cluster, Device, Link, Node
from rlplace.errors import InputError
from rlplace.plan.types import Instance, Plan
from rlplace.planners.grid import grid
from rlplace.planners.replicas import zero3
from rlplace.planners.types import Budget, PlannerResult
from rlplace.units import format_bytes

_FACTORS = (2, 3, 4, 6, 8, 16, 32, 64)
#: A NIC for clusters of one node that have none: 200 Gb/s, 5 us.
_NIC = Link(25e9, 5e-6, "ib200")
_PER_NODE = 8
#: Chunks of a loss that are tried.
_CHUNKS = 8
#: What is said of a change, and the fields of the instance that it changes.
_Changes = Iterable[tuple[str, dict[str, Any]]]


def smallest_changes(instance: Instance, seconds: float = 2.0) -> tuple[str, ...]:
    """Changes of one input, each of which makes some plan fit, the smallest of each kind.

    Args:
        instance: An instance on which no plan was found that fits.
        seconds: What may be spent on trying.
    """
    narrow = _fitting(instance, seconds, _smaller_states(instance))
    both = {"precision": "bf16", "optimizer": "adamw-8bit"}
    if not narrow and instance.optimizer == "adamw":
        text = "bf16 weights with an 8-bit optimizer (precision=bf16, optimizer=adamw-8bit)"
        narrow = _fitting(instance, seconds, [(text, both)])
    return (
        *_more_devices(instance, seconds),
        *narrow,
        *_fitting(instance, seconds, _less_kept(instance)),
    )


def _fitting(instance: Instance, seconds: float, changes: _Changes) -> list[str]:
    """What is said of those changes with which something fits."""
    return [text for text, fields in changes if _fit(instance, seconds, fields)]


def _more_devices(instance: Instance, seconds: float) -> Iterator[str]:
    """The smallest multiple of the cluster on which something fits, and how."""
    for factor in _FACTORS:
        cluster = scaled(instance.cluster, factor)
        if plan := _fit(instance, seconds, {"cluster": cluster}):
            zero = max(choice.zero for stage in plan.stages for choice in stage.choices)
            yield (
                f"{factor} times the devices ({len(cluster.devices)} instead of "
                f"{len(instance.cluster.devices)})" + (f" with ZeRO-{zero}" if zero else "")
            )
            return


def _smaller_states(instance: Instance) -> _Changes:
    """Changes that make weights, gradients and optimizer states smaller."""
    if instance.optimizer == "adamw":
        yield "an 8-bit optimizer (optimizer=adamw-8bit)", {"optimizer": "adamw-8bit"}
    if instance.precision != "bf16":
        yield "bf16 weights and optimizer states (precision=bf16)", {"precision": "bf16"}


def _less_kept(instance: Instance) -> _Changes:
    """Changes that keep states elsewhere, or less from the forward to the backward pass."""
    if not instance.offload:
        yield "the optimizer states in the memory of the host (offload=True)", {"offload": True}
    if instance.attention == "math":
        kernel = {"attention": "flash"}
        yield "a flash attention kernel, which keeps no score matrix (attention=flash)", kernel
        if "attention" not in instance.recompute_modes:
            modes = {"recompute_modes": (*instance.recompute_modes, "attention")}
            yield "redoing the core attention (recompute_modes with attention)", modes
    if _has_logits(instance):
        chunks = {"loss_chunks": _CHUNKS}
        yield f"the loss in {_CHUNKS} chunks of tokens (loss_chunks={_CHUNKS})", chunks


def shortage(instance: Instance, result: PlannerResult) -> str:
    """By how much the least overfull plan misses, and on which device."""
    if result.estimate is None:
        return "no plan could be built"
    worst = max(
        range(len(result.estimate.peak_memory)),
        key=lambda d: (
            result.estimate.peak_memory[d] / instance.memory_limit(d) if result.estimate else 0.0
        ),
    )
    peak = result.estimate.peak_memory[worst]
    kind = instance.cluster.devices[worst].kind
    return (
        f"the leanest plan needs {format_bytes(peak)} on device {worst} ({kind}), "
        f"whose limit is {format_bytes(instance.memory_limit(worst))}"
    )


def scaled(cluster: Cluster, factor: int) -> Cluster:
    """The cluster `factor` times: a small node grows to 8 devices, then nodes are repeated."""
    nodes, devices = list(cluster.nodes), list(cluster.devices)
    if len(nodes) == 1 and len(devices) * factor <= _PER_NODE:
        devices = [
            Device(index, devices[index % len(cluster.devices)].kind, 0)
            for index in range(len(cluster.devices) * factor)
        ]
        return replace(cluster, devices=tuple(devices), overrides=(), curves=())
    for copy in range(1, factor):
        for node in cluster.nodes:
            nodes.append(Node(node.index + copy * len(cluster.nodes), node.intra, node.nic))
        for device in cluster.devices:
            index = device.index + copy * len(cluster.devices)
            devices.append(Device(index, device.kind, device.node + copy * len(cluster.nodes)))
    joined = tuple(replace(node, nic=node.nic or _NIC) for node in nodes)
    return replace(cluster, devices=tuple(devices), nodes=joined, overrides=(), curves=())


def _has_logits(instance: Instance) -> bool:
    """Whether a loss keeps class scores, all at once."""
    works = (structure.work for structure in instance.graph.structures)
    return instance.loss_chunks == 1 and any(work.logits_bytes(1.0) for work in works)


def _fit(instance: Instance, seconds: float, changes: dict[str, Any]) -> Plan | None:
    """A plan that fits the instance with some of its fields changed, or None.

    Args:
        instance: The question.
        seconds: What all changes together may spend on trying.
        changes: Fields and their values.
    """
    try:
        changed = replace(instance, **changes)
    except InputError:  # a device kind that lacks the dtype
        return None
    budget, rng = Budget(seconds=seconds / 8), np.random.default_rng(0)
    lean = zero3(changed, budget, rng)
    return lean.plan or grid(changed, budget, rng).plan
