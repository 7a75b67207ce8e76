"""Which devices a stage may take, and in which shape: enumeration shared by the searches.

Devices are lined up island by island; a stage takes a run of the line. Inside a node a run is an
aligned divisor of the node, beyond it a number of whole nodes, so that symmetric choices are
offered once and a thousand devices have few runs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import islice, permutations
from math import gcd

from rlplace.errors import InputError
from rlplace.plan.types import Instance, Mesh

#: Devices of each node.
Nodes = Sequence[tuple[int, ...]]

#: With at most so many devices every run is allowed.
_SMALL = 12
#: At most so many orders of islands are tried.
_ORDERS = 6


def device_orders(instance: Instance) -> tuple[tuple[int, ...], ...]:
    """Lines of devices: the islands in every order (up to a few), nodes whole inside each."""
    islands = instance.cluster.islands
    orders = islice(permutations(islands), _ORDERS)
    return tuple(tuple(device for island in order for device in island) for order in orders)


def runs(instance: Instance, order: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    """Runs [start, stop) of a line of devices that a stage may take."""
    count = len(order)
    if small(instance):
        return tuple((a, b) for b in range(1, count + 1) for a in range(b))
    nodes = _node_bounds(instance, order)
    found = {(0, count)}
    for first, last in nodes:
        size = last - first
        for width in (w for w in range(1, size + 1) if size % w == 0):
            found |= {(a, a + width) for a in range(first, last, width)}
    for index in range(len(nodes)):
        for more in range(index, len(nodes)):
            width = more - index + 1
            if width <= 4 or (width % 2 == 0 and width <= 8) or width & (width - 1) == 0:
                found.add((nodes[index][0], nodes[more][1]))
        found |= {(nodes[index][0], count), (0, nodes[index][1])}
    return tuple(sorted(found, key=lambda run: (run[1], run[0])))


def small(instance: Instance) -> bool:
    """Whether the devices are so few that every run of them is offered."""
    return len(instance.cluster.devices) <= _SMALL


def mesh_shapes(
    instance: Instance, devices: tuple[int, ...], micro_batch: int, uneven: bool = False
) -> list[Mesh]:
    """Meshes over a run of devices: tp inside nodes of one kind, dp over the rest.

    Where replicas span nodes, sharding inside a node and replicating across (HSDP) is offered
    beside sharding over all of them.

    Args:
        instance: The question.
        devices: The run.
        micro_batch: Samples of a micro-batch; dp divides it.
        uneven: Whether dp need not, for replicas may have unequal shares; of many devices only
            where they are of several kinds.
    """
    found = []
    for tp in instance.offered_tp:
        dp = len(devices) // tp
        if len(devices) % tp or (tp > 1 and not whole(instance, devices, tp)):
            continue
        if micro_batch % dp and not (uneven and may_share(instance, devices, dp, micro_batch)):
            continue
        found.append(Mesh(devices, 1, dp, 1, tp))
        nodes = Counter(instance.cluster.devices[device].node for device in devices)
        inside = set(nodes.values())
        if len(nodes) > 1 and len(inside) == 1 and (per := inside.pop()) > tp and per % tp == 0:
            if any(level for level in instance.zero_levels):
                found.append(Mesh(devices, len(nodes), per // tp, 1, tp))
    return found


def may_share(
    instance: Instance, devices: tuple[int, ...], replicas: int, micro_batch: int
) -> bool:
    """Whether unequal shares of a micro-batch are offered to replicas that do not divide it."""
    kinds = {instance.cluster.devices[device].kind for device in devices}
    return micro_batch > replicas and (small(instance) or len(kinds) > 1)


def whole(instance: Instance, devices: tuple[int, ...], tp: int) -> bool:
    """Whether no tp group mixes kinds or leaves a node."""
    groups = (devices[start : start + tp] for start in range(0, len(devices), tp))
    described = instance.cluster.devices
    return all(len({(described[d].kind, described[d].node) for d in g}) == 1 for g in groups)


def equal_nodes(instance: Instance) -> Nodes:
    """Devices of each node, the slowest first; of parts of nodes, where nodes differ in size."""
    devices, dtype = instance.cluster.devices, instance.bytes.compute
    peak = {kind.name: kind.peak_flops[dtype] for kind in instance.cluster.kinds}
    nodes = [
        sorted((d.index for d in devices if d.node == node.index), key=lambda d: devices[d].kind)
        for node in instance.cluster.nodes
    ]
    size = gcd(*(len(own) for own in nodes))
    parts = [
        tuple(own[start : start + size]) for own in nodes for start in range(0, len(own), size)
    ]
    return sorted(parts, key=lambda own: sum(peak[devices[d].kind] for d in own))


def alike(instance: Instance, mesh: Mesh) -> bool:
    """Whether every tp group is of one kind."""
    described = instance.cluster.devices
    return all(len({described[device].kind for device in group}) == 1 for group in mesh.tp_groups())


def refuse_shapeless(instance: Instance) -> None:
    """Refuse tp degrees of which no run of devices is a whole number of groups.

    Raises:
        InputError: If no stage could have a mesh.
    """
    for order in device_orders(instance):
        for first, last in runs(instance, order):
            if mesh_shapes(instance, order[first:last], instance.global_batch):
                return
    rule = "no stage's devices are a whole number of such tp groups inside nodes"
    raise InputError("tp_degrees", instance.tp_degrees, rule, (1,))


def _node_bounds(instance: Instance, order: tuple[int, ...]) -> list[tuple[int, int]]:
    bounds: list[tuple[int, int]] = []
    start = 0
    for index in range(1, len(order) + 1):
        ends = index == len(order) or (
            instance.cluster.devices[order[index]].node
            != instance.cluster.devices[order[index - 1]].node
        )
        if ends:
            bounds.append((start, index))
            start = index
    return bounds
