"""What a public op-graph file says: the graph, and costs in the format's own terms.

The costs lie beside the `OpGraph`, never in it: an ordinary model carries none of this. Times are
in the file's own unit, which no format names: compare them with each other only. Everything that
is listed by op is in the order of `OpGraph.groups`, everything by edge in that of `OpGraph.edges`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rlplace.graph.types import OpGraph


@dataclass(frozen=True, slots=True)
class LoadCosts:
    """Costs of msr-fiddle/dnn-partitioning (Tarnawski et al., NeurIPS 2020).

    Devices are numbered CPUs first, then accelerators.

    Args:
        cpu_times: Time of each op on a CPU.
        accelerator_times: Time of each op on an accelerator.
        on_accelerator: Whether an op may run on an accelerator at all.
        memory: Bytes of each op on an accelerator.
        transfers: Time to move the output of each op between an accelerator and the host.
        backward: Whether an op belongs to the backward pass.
        colors: Ops of one color class have to share a device; None for an op that is free.
        cpus: Number of CPUs.
        accelerators: Number of accelerators.
        memory_cap: Bytes of an accelerator; a CPU has no limit.
    """

    cpu_times: tuple[float, ...]
    accelerator_times: tuple[float, ...]
    on_accelerator: tuple[bool, ...]
    memory: tuple[float, ...]
    transfers: tuple[float, ...]
    backward: tuple[bool, ...]
    colors: tuple[int | None, ...]
    cpus: int
    accelerators: int
    memory_cap: float

    @property
    def devices(self) -> int:
        """Number of devices."""
        return self.cpus + self.accelerators


@dataclass(frozen=True, slots=True)
class EventCosts:
    """Costs of the event simulators of GiPH (Hu et al., MLSys 2023) and DOPPLER (Yao et al., 2026).

    Op `o` takes ``compute[o] * rates[d]`` on device `d`; the data of edge `e` takes
    ``delays[i][j] + sizes[e] * transfer_rates[i][j]`` from device `i` to another device `j`.

    Args:
        compute: Work of each op.
        sizes: Data of each edge.
        rates: Time of a unit of work on each device.
        delays: Latency from device to device.
        transfer_rates: Time of a unit of data from device to device.
        legal: The devices on which each op may run.
    """

    compute: tuple[float, ...]
    sizes: tuple[float, ...]
    rates: tuple[float, ...]
    delays: tuple[tuple[float, ...], ...]
    transfer_rates: tuple[tuple[float, ...], ...]
    legal: tuple[tuple[int, ...], ...]

    @property
    def devices(self) -> int:
        """Number of devices."""
        return len(self.rates)


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to run a layer in Piper: a tensor-parallel degree, with or without recompute.

    Args:
        degree: Tensor-parallel degree.
        name: Name of the variant, unique at its degree (``vanilla``, ``activation recomp``).
        time: Time of a micro-batch, forward and backward.
        params: Bytes of parameters, for the data-parallel exchange.
        memory_each: Bytes for each micro-batch in flight.
        memory_fixed: Bytes whatever is in flight.
        sync_in: Bytes that tensor parallelism adds to an incoming edge: (group, bytes).
        sync_out: The same of an outgoing edge.
    """

    degree: int
    name: str
    time: float
    params: float
    memory_each: float
    memory_fixed: float
    sync_in: tuple[tuple[int, float], ...]
    sync_out: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class PiperCosts:
    """Costs of Piper (Tarnawski et al., NeurIPS 2021).

    Args:
        variants: The variants of each layer.
        edge_bytes: Bytes of each edge for a micro-batch.
        bandwidth: Bytes a unit of time from a device to the outside.
        devices: Number of devices.
        memory_cap: Bytes of a device.
        micro_batches: Micro-batches of a batch.
    """

    variants: tuple[tuple[Variant, ...], ...]
    edge_bytes: tuple[float, ...]
    bandwidth: float
    devices: int
    memory_cap: float
    micro_batches: int


GivenCosts = LoadCosts | EventCosts | PiperCosts


@dataclass(frozen=True)
class GivenInstance:
    """A public planning problem.

    Args:
        name: Name of the instance.
        format: ``dnn-partitioning``, ``piper``, ``doppler`` or ``giph``.
        graph: One group for each node of the file. The groups have no work, since the format gives
            times instead; structures tell nodes of different costs apart.
        costs: Costs and devices.
        positions: Position in the file of each group's node.
    """

    name: str
    format: str
    graph: OpGraph
    costs: GivenCosts
    positions: tuple[int, ...]

    def from_file_order(self, placement: Sequence[int]) -> tuple[int, ...]:
        """A list by node of the file, as peers write it, as a list by group."""
        return tuple(placement[position] for position in self.positions)
