"""Which slice of a tensor each rank of a stage holds, and which slices go from whom to whom.

A rank of a stage holds the rows of its replica and, where the axis of the mesh cuts the tensor, its
part of one dim. What a rank of the next stage needs is said likewise; what both have in common is
what the one sends to the other. All of it follows from the plan: at run time there is no
negotiation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from rlplace.errors import InputError
from rlplace.graph.sharding.shards import runs_of
from rlplace.graph.types import Placement, Replicate, Shard
from rlplace.plan.types import Stage
from rlplace.runtime.boundary import TensorSpec
from rlplace.runtime.rows import replica_rows

#: A run of a dim: where it starts, and how long it is.
Run = tuple[int, int]
#: A run of each dim.
Box = tuple[Run, ...]


@dataclass(frozen=True, slots=True)
class Message:
    """What one rank sends to another of one tensor of a micro-batch.

    Args:
        source: Rank that sends.
        target: Rank that receives; where it is the same, nothing is sent.
        tensor: Index of the tensor among those of the border.
        take: Boxes of what the sender holds.
        put: The same boxes in what the receiver holds.
    """

    source: int
    target: int
    tensor: int
    take: tuple[Box, ...]
    put: tuple[Box, ...]

    @property
    def elements(self) -> int:
        """Elements of the tensor that it has."""
        return sum(elements(box) for box in self.take)


def elements(box: Box) -> int:
    """Elements of a box."""
    return prod(length for _, length in box)


@dataclass(frozen=True)
class Side:
    """A stage at a border.

    Args:
        stage: The stage.
        forms: In which form it holds each tensor of the border (`rlplace.runtime.boundary.forms`).
    """

    stage: Stage
    forms: tuple[Placement, ...]

    @property
    def size(self) -> int:
        """Ranks of a replica, over which the axis that cuts activations runs."""
        return self.stage.mesh.cp * self.stage.mesh.tp


@dataclass(frozen=True)
class Crossing:
    """One direction of a border.

    Args:
        tensors: Tensors of the border.
        sender: The stage that sends: the earlier one forward, the later one backward.
        receiver: The stage that receives.
        micro_batch: Samples of a whole micro-batch.
        backward: Whether these are gradients. Then a tensor without a batch dim gets the sum of
            what its readers send; forward it comes from one of its makers.
    """

    tensors: tuple[TensorSpec, ...]
    sender: Side
    receiver: Side
    micro_batch: int
    backward: bool

    def __post_init__(self) -> None:
        stages = self.sender.stage, self.receiver.stage
        sent, got = (stage.samples(self.micro_batch) for stage in stages)
        for spec in self.tensors:
            if sent != got and spec.mixed:
                rule = (
                    f"{spec.name} has a dim that mixes samples with something else, so it cannot "
                    f"be cut between stages whose replicas have different samples"
                )
                near = "the same dp degree and shares on both"
                raise InputError("plan.stages.mesh", (sent, got), rule, near)

    def shape(self, tensor: int, rank: int, rows: int) -> tuple[int, ...]:
        """Shape of what a receiving rank holds of a tensor."""
        side = self.receiver
        replica, place = divmod(side.stage.mesh.devices.index(rank), side.size)
        own = replica_rows(side.stage, self.micro_batch, rows)[replica]
        runs = _held(self.tensors[tensor], side.forms[tensor], own, place, side.size)
        return tuple(sum(length for _, length in dim) for dim in runs)

    def messages(self, rows: int) -> tuple[Message, ...]:
        """The messages of one micro-batch; every needed element comes to each receiver once.

        Where the sender's axis does not cut a tensor, rank t of an axis takes it from rank
        ``t mod size`` of the other side; of equal gradients one is used.

        Args:
            rows: Rows of the micro-batch.
        """
        return tuple(
            message
            for index, spec in enumerate(self.tensors)
            if spec.grad or not self.backward
            for message in _of_tensor(self, index, rows)
        )


def _of_tensor(crossing: Crossing, index: int, rows: int) -> list[Message]:
    spec, sender, receiver = crossing.tensors[index], crossing.sender, crossing.receiver
    theirs, ours = (
        replica_rows(side.stage, crossing.micro_batch, rows) for side in (sender, receiver)
    )
    found = []
    for to, from_ in _pairs(spec, theirs, ours, crossing.backward):
        for place in range(receiver.size):
            needed = _held(spec, receiver.forms[index], ours[to], place, receiver.size)
            whole = isinstance(sender.forms[index], Replicate)
            holders = [place % sender.size] if whole else range(sender.size)
            for holder in holders:
                held = _held(spec, sender.forms[index], theirs[from_], holder, sender.size)
                take, put = _common(held, needed)
                if take:
                    source = sender.stage.mesh.devices[from_ * sender.size + holder]
                    target = receiver.stage.mesh.devices[to * receiver.size + place]
                    found.append(Message(source, target, index, take, put))
    return found


def _pairs(
    spec: TensorSpec, senders: Sequence[range], receivers: Sequence[range], backward: bool
) -> list[tuple[int, int]]:
    """Replicas that receive and those that send to them; replicas without rows do neither."""
    sending, receiving = ([i for i, r in enumerate(rows) if r] for rows in (senders, receivers))
    if spec.mixed or spec.batch_dim is not None:
        return [
            (to, from_)
            for to in receiving
            for from_ in sending
            if max(senders[from_].start, receivers[to].start)
            < min(senders[from_].stop, receivers[to].stop)
        ]
    if not backward:
        places = ((to, at * len(sending) // len(receiving)) for at, to in enumerate(receiving))
        return [(to, sending[place]) for to, place in places]
    places = ((at * len(receiving) // len(sending), from_) for at, from_ in enumerate(sending))
    return sorted((receiving[place], from_) for place, from_ in places)


def _held(
    spec: TensorSpec, form: Placement, rows: range, place: int, size: int
) -> tuple[tuple[Run, ...], ...]:
    """Runs of each dim of the whole tensor of a micro-batch that a rank holds, in its order."""
    dims: list[tuple[Run, ...]] = []
    for dim, line in enumerate(spec.sizes):
        start = 0 if spec.mixed else line.per_sample * rows.start
        length = line(len(rows))
        run: tuple[Run, ...] = ((start, length),)
        if isinstance(form, Shard) and form.dim == dim and size > 1:
            count = runs_of(length, form.blocks, form.run)
            each = length // count
            part = each // size
            run = tuple((start + i * each + place * part, part) for i in range(count))
        dims.append(run)
    return tuple(dims)


def _common(
    held: Sequence[Sequence[Run]], needed: Sequence[Sequence[Run]]
) -> tuple[tuple[Box, ...], tuple[Box, ...]]:
    """What is in both, as boxes of what is held and of what is needed."""
    takes: list[Box] = [()]
    puts: list[Box] = [()]
    for own, wanted in zip(held, needed, strict=True):
        overlaps = _overlaps(own, wanted)
        takes = [(*box, (take, length)) for box in takes for take, _, length in overlaps]
        puts = [(*box, (put, length)) for box in puts for _, put, length in overlaps]
    return tuple(takes), tuple(puts)


def _overlaps(held: Sequence[Run], needed: Sequence[Run]) -> list[tuple[int, int, int]]:
    """(offset in what is held, offset in what is needed, length), adjacent ones as one."""
    found: list[tuple[int, int, int]] = []
    before = 0
    for start, length in held:
        inside = 0
        for other, size in needed:
            first, last = max(start, other), min(start + length, other + size)
            if first < last:
                take, put = before + first - start, inside + first - other
                if found and (found[-1][0] + found[-1][2], found[-1][1] + found[-1][2]) == (
                    take,
                    put,
                ):
                    take, put = found[-1][:2]
                    last += found.pop()[2]
                found.append((take, put, last - first))
            inside += size
        before += length
    return found
