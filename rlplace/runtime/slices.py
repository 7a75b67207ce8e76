"""Which slice of a tensor each rank of a stage holds, and which slices go from whom to whom.

A rank of a stage holds the rows of its replica and, where an axis of the mesh cuts the tensor, its
part of a dim. What a rank of the next stage needs is said likewise; what both have in common is
what the one sends to the other. All of it follows from the plan: at run time there is no
negotiation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from rlplace.errors import InputError
from rlplace.graph.sharding.shards import runs_of
from rlplace.graph.types import Placement, Shard
from rlplace.plan.types import Mesh, Stage
from rlplace.runtime.boundary import Form, TensorSpec
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
    forms: tuple[Form, ...]

    @property
    def size(self) -> int:
        """Ranks of a replica, over which the axes that cut activations run."""
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
        runs = _held(self.tensors[tensor], side, tensor, own, place)
        return tuple(sum(length for _, length in dim) for dim in runs)

    def messages(self, rows: int) -> tuple[Message, ...]:
        """The messages of one micro-batch; every needed element comes to each receiver once.

        Where an axis of the sender does not cut a tensor, rank t of the receiver's replica takes it
        from rank ``t mod size`` of that axis; of equal gradients one is used.

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
            needed = _held(spec, receiver, index, ours[to], place)
            for holder in _holders(sender.forms[index], sender.stage.mesh, place):
                held = _held(spec, sender, index, theirs[from_], holder)
                take, put = _common(held, needed)
                if take:
                    source = sender.stage.mesh.devices[from_ * sender.size + holder]
                    target = receiver.stage.mesh.devices[to * receiver.size + place]
                    found.append(Message(source, target, index, take, put))
    return found


def _holders(form: Form, mesh: Mesh, place: int) -> list[int]:
    """The ranks of a replica that a receiving rank asks: together they have a tensor once."""
    by_cp, by_tp = isinstance(form.cp, Shard), isinstance(form.tp, Shard)
    if not by_cp and not by_tp:
        return [place % (mesh.cp * mesh.tp)]
    across = range(mesh.cp) if by_cp else [place % mesh.cp]
    along = range(mesh.tp) if by_tp else [place % mesh.tp]
    return [one * mesh.tp + other for one in across for other in along]


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
    spec: TensorSpec, side: Side, tensor: int, rows: range, place: int
) -> tuple[tuple[Run, ...], ...]:
    """Runs of each dim of the whole tensor of a micro-batch that a rank holds, in its order."""
    form, mesh = side.forms[tensor], side.stage.mesh
    across, along = divmod(place, mesh.tp)
    dims: list[tuple[Run, ...]] = []
    for dim, line in enumerate(spec.sizes):
        start = 0 if spec.mixed else line.per_sample * rows.start
        runs: tuple[Run, ...] = ((start, line(len(rows))),)
        runs = _cut(runs, dim, form.cp, (across, mesh.cp), 1)
        inside = mesh.cp if isinstance(form.cp, Shard) and form.cp.dim == dim else 1
        dims.append(_cut(runs, dim, form.tp, (along, mesh.tp), inside))
    return tuple(dims)


def _cut(
    runs: tuple[Run, ...], dim: int, placement: Placement, place: tuple[int, int], inside: int
) -> tuple[Run, ...]:
    """What one rank of an axis holds of some runs of a dim.

    Args:
        runs: The runs.
        dim: The dim.
        placement: On the axis.
        place: Coordinate on the axis, and its size.
        inside: In how many parts another axis has cut the dim before.
    """
    rank, size = place
    if not isinstance(placement, Shard) or placement.dim != dim or size == 1:
        return runs
    length = sum(own for _, own in runs)
    count = runs_of(length, placement.blocks, placement.run // inside)
    each = length // count
    part = each // size
    wanted = ((i * each + rank * part, part) for i in range(count))
    return tuple(run for start, own in wanted for run in _within(runs, start, own))


def _within(runs: Sequence[Run], start: int, length: int) -> list[Run]:
    """Some of the elements of runs, counted as they lie one behind the other."""
    found, before = [], 0
    for first, own in runs:
        low, high = max(start, before), min(start + length, before + own)
        if low < high:
            found.append((first + low - before, high - low))
        before += own
    return found


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
