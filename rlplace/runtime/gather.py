"""What all ranks noted, brought together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from rlplace.graph.types import Placement
from rlplace.plan.types import Plan
from rlplace.runtime.assemble import Assembly
from rlplace.runtime.local import CountedAxis
from rlplace.runtime.measure import Measurement, merge, within
from rlplace.runtime.phases import Use
from rlplace.runtime.shard import unshard
from rlplace.runtime.weight_slices import joined
from rlplace.runtime.world import World
from rlplace.simulate.types import Event


@dataclass
class Notes:
    """What one rank noted.

    Args:
        starts: Clock at the start of each step (s).
        ends: Clock at the end of each step (s).
        losses: Its share of the loss of each step; empty but on one tp rank of the last stage.
        events: The events of each step.
        use: Its peak bytes.
        resident: By how many bytes its resident set grew.
        traffic: Bytes it gave to each kind of communication, all steps.
        executed: The actions that it ran in a step, as text.
        beside: What other threads did meanwhile.
    """

    starts: list[float]
    ends: list[float]
    losses: list[float]
    events: list[list[Event]]
    use: Use
    resident: int
    traffic: dict[str, int]
    executed: str = ""
    beside: list[Event] = field(default_factory=list)


def measurement(world: World, plan: Plan, own: Notes, warmup: int) -> Measurement:
    """The measurement, on every rank the same."""
    every: list[Any] = [None] * world.size
    dist.all_gather_object(every, own)
    notes: list[Notes] = every
    begins = [min(n.starts[i] for n in notes) for i in range(len(own.starts))]
    ends = [max(n.ends[i] for n in notes) for i in range(len(own.starts))]
    times = [end - begin for begin, end in zip(begins, ends, strict=True)]
    counted = sorted(range(warmup, len(times)), key=lambda index: times[index])
    middle = counted[len(counted) // 2] if counted else None
    events = [] if middle is None else _events(notes, middle, begins[middle], ends[middle])
    traffic: Counter[str] = Counter()
    for note in notes:
        traffic.update(note.traffic)
    return Measurement(
        step_times=tuple(times[warmup:]),
        warmup=warmup,
        losses=tuple(map(sum, zip(*(n.losses for n in notes if n.losses), strict=True))),
        memory=tuple(n.use.memory for n in notes),
        resident_growth=tuple(n.resident for n in notes),
        timeline=merge(events, 0.0 if middle is None else begins[middle], "measured"),
        traffic={kind: total // max(1, len(times)) for kind, total in sorted(traffic.items())},
        device=world.device.type,
        graph=plan.graph,
        executed=tuple(n.executed for n in notes),
        peak_phase=tuple(n.use.phase for n in notes),
        phase_peaks=tuple(n.use.peaks for n in notes),
        rank_traffic=tuple(
            {kind: total // max(1, len(times)) for kind, total in sorted(n.traffic.items())}
            for n in notes
        ),
    )


def _events(notes: Iterable[Notes], step: int, start: float, end: float) -> list[Event]:
    """All events of a step, and the parts of what went on beside it."""
    return [e for n in notes for e in (*n.events[step], *within(n.beside, start, end))]


def traffic_of(assembly: Assembly) -> dict[str, int]:
    """Bytes that this rank gave to each kind of communication so far."""
    traffic: Counter[str] = Counter(
        {"all_reduce": 0, "p2p": sum(channel.bytes_sent for channel in assembly.channels)}
    )
    if assembly.reducer is not None:
        traffic.update(assembly.reducer.traffic)
    for axis in (assembly.axes.cp, assembly.axes.tp):
        if isinstance(axis, CountedAxis):
            traffic.update(axis.traffic)
    return dict(traffic)


def full_tensors(world: World, assembly: Assembly) -> dict[str, torch.Tensor]:
    """Gradients, weights and buffers of the whole model, on rank 0; empty on the others."""
    if assembly.reducer is not None:
        assembly.reducer.complete()
    every: list[Any] | None = [None] * world.size if world.rank == 0 else None
    dist.gather_object(_shards(assembly) if assembly.replica == 0 else {}, every)
    found: dict[tuple[str, int], dict[int, tuple[torch.Tensor, Placement]]] = {}
    for part in every or []:
        for key, (tensor, placement, lane, rank) in part.items():
            found.setdefault((key, lane), {})[rank] = (tensor, placement)
    whole = {}
    for (key, _), shards in found.items():
        tensors = [shards[rank][0] for rank in sorted(shards)]
        whole[key] = unshard(tensors, shards[0][1])
    return whole


def _shards(assembly: Assembly) -> dict[str, tuple[torch.Tensor, Placement, int, int]]:
    """What this rank holds: tensor, placement, lane and coordinate on the tp axis."""
    params = assembly.params()
    grads = {key: param.grad for key, param in params.items() if param.grad is not None}
    weights = joined({key: param.detach() for key, param in params.items()})
    own = {f"weight/{name}": weight for name, weight in weights.items()}
    own |= {f"gradient/{name}": grad for name, grad in joined(grads).items()}
    own |= {f"buffer/{name}": buffer for name, buffer in assembly.buffers().items()}
    lane, (rank, _) = min(assembly.stages, default=-1), assembly.tp
    return {
        key: (tensor.cpu().clone(), assembly.placements[key.partition("/")[2]], lane, rank)
        for key, tensor in own.items()
    }
