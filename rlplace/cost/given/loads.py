"""The objective of dnn-partitioning: the largest load of a device.

Tarnawski et al., "Efficient Algorithms for Device Placement of DNN Graph Operators", NeurIPS 2020.
The latency objective of the same paper is not here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from rlplace.cost.given.common import check_placement, costs_of
from rlplace.graph.formats.types import GivenInstance, LoadCosts


def device_loads(instance: GivenInstance, placement: Sequence[int]) -> tuple[float, ...]:
    """Load of each device, whether or not the placement is legal.

    A CPU's load is the time of its ops. An accelerator's is the time of its ops, and the transfer
    of every op whose output crosses its border, in or out, once each however many edges cross
    (msr-fiddle/dnn-partitioning, README and throughput-ip/ip.py; communication not overlapped).

    Args:
        instance: A dnn-partitioning instance.
        placement: Device of each group: CPUs first, then accelerators.

    Raises:
        InputError: If the instance is of another form, or the placement names no such device.
    """
    costs = costs_of(instance, LoadCosts)
    check_placement(instance, placement, costs.devices)
    loads = [0.0] * costs.devices
    for op, device in enumerate(placement):
        times = costs.cpu_times if device < costs.cpus else costs.accelerator_times
        loads[device] += times[op]
    crossing = {
        (edge.src, device)
        for edge in instance.graph.edges
        if placement[edge.src] != placement[edge.dst]
        for device in (placement[edge.src], placement[edge.dst])
        if device >= costs.cpus
    }
    for op, device in sorted(crossing):
        loads[device] += costs.transfers[op]
    return tuple(loads)


def color_of(costs: LoadCosts, op: int) -> int | None:
    """The color class of an op; None for a free one, which the table form writes as -1.

    Args:
        costs: Costs of the instance.
        op: The op.
    """
    color = costs.colors[op]
    return None if color is None or color < 0 else color


def broken_rule(instance: GivenInstance, placement: Sequence[int]) -> str | None:
    """Why a placement of a dnn-partitioning instance is illegal; None if it is legal.

    Three rules: an accelerator runs only ops that it supports, holds no more than its memory, and
    ops of one color class share a device. (Contiguity is a choice of the planner, not of the form.)

    Args:
        instance: A dnn-partitioning instance.
        placement: As in `device_loads`.
    """
    costs = costs_of(instance, LoadCosts)
    check_placement(instance, placement, costs.devices)
    memory = [0.0] * costs.devices
    home: dict[int, int] = {}
    for op, device in enumerate(placement):
        name = instance.graph.groups[op].name
        if device >= costs.cpus:
            memory[device] += costs.memory[op]
            if not costs.on_accelerator[op]:
                return f"{name} cannot run on an accelerator"
        color = color_of(costs, op)
        if color is not None and home.setdefault(color, device) != device:
            return f"{name} must share a device with the other ops of color class {color}"
    for device, used in enumerate(memory):
        if used > costs.memory_cap:
            return f"device {device} needs {used:.0f} bytes of {costs.memory_cap:.0f}"
    return None


def max_load(instance: GivenInstance, placement: Sequence[int]) -> float:
    """The objective of dnn-partitioning: the largest device load, the time of a pipelined sample.

    Args:
        instance: A dnn-partitioning instance.
        placement: As in `device_loads`.

    Returns:
        The load; infinity if the placement is illegal (`broken_rule` says why).
    """
    loads = device_loads(instance, placement)
    return math.inf if broken_rule(instance, placement) else max(loads)
