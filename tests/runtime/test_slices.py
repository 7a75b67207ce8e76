from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlplace.errors import InputError
from rlplace.graph.sharding.shards import cut
from rlplace.graph.types import Placement, Replicate, Shard
from rlplace.plan.types import Mesh, Stage
from rlplace.runtime.boundary import Form, Size, TensorSpec
from rlplace.runtime.rows import replica_rows
from rlplace.runtime.slices import Box, Crossing, Message, Side

WHOLE, UNCUT = Replicate(), Form()
#: Sequences of 12 tokens; rows of them one behind the other; one for all samples; indices.
BATCHED = TensorSpec("x", (Size(0, 1), Size(12), Size(4)), torch.float32, True)
FLAT = TensorSpec("flat", (Size(0, 12), Size(4)), torch.float32, True)
SHARED = TensorSpec("bias", (Size(8),), torch.float32, True)
IDS = TensorSpec("ids", (Size(0, 1),), torch.int64, False)
TENSORS = (BATCHED, FLAT, SHARED, IDS)
FORMS: dict[str, tuple[Placement, ...]] = {
    "x": (WHOLE, Shard(1), Shard(2), Shard(1, blocks=3)),
    "flat": (WHOLE, Shard(0, run=12), Shard(1)),
    "bias": (WHOLE, Shard(0), Shard(0, blocks=2)),
    "ids": (WHOLE,),
}


@st.composite
def sides(draw: st.DrawFn, first: int, samples: int) -> Side:
    dp = draw(st.integers(1, 3))
    cp, tp = draw(st.sampled_from([(1, 1), (1, 2), (2, 1), (2, 2)]))
    devices = tuple(range(first, first + dp * cp * tp))
    mesh = Mesh(devices, dp_replicate=dp, cp=cp, tp=tp)
    cuts = sorted(draw(st.sets(st.integers(1, samples - 1), min_size=dp - 1, max_size=dp - 1)))
    shares = tuple(b - a for a, b in zip((0, *cuts), (*cuts, samples), strict=True))
    forms = tuple(
        Form(*(draw(st.sampled_from(FORMS[spec.name])) for _ in range(2))) for spec in TENSORS
    )
    return Side(Stage(0, 1, mesh, (), shares), forms)


@st.composite
def crossings(draw: st.DrawFn) -> tuple[Crossing, int]:
    """A border, and the rows of a micro-batch of six samples."""
    sender, receiver = draw(sides(0, 6)), draw(sides(100, 6))
    backward = draw(st.booleans())
    return Crossing(TENSORS, sender, receiver, 6, backward), draw(st.integers(0, 6))


def whole(spec: TensorSpec, rows: int) -> torch.Tensor:
    shape = spec.shape(rows)
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float64).view(shape)


def held(spec: TensorSpec, side: Side, form: Form, rank: int, rows: int) -> torch.Tensor:
    """What a rank holds of a whole tensor: what tp leaves of what cp leaves."""
    replica, place = divmod(side.stage.mesh.devices.index(rank), side.size)
    own = replica_rows(side.stage, 6, rows)[replica]
    tensor = whole(spec, rows)
    if spec.batch_dim is not None:
        each = spec.sizes[spec.batch_dim].per_sample
        tensor = tensor.narrow(spec.batch_dim, own.start * each, len(own) * each)
    mesh = side.stage.mesh
    if isinstance(form.cp, Shard) and mesh.cp > 1:
        by_cp = form.cp
        tensor = cut(tensor, by_cp.dim, by_cp.blocks, place // mesh.tp, mesh.cp, by_cp.run)
    if isinstance(form.tp, Shard) and mesh.tp > 1:
        inside = isinstance(form.cp, Shard) and form.cp.dim == form.tp.dim
        run = form.tp.run // (mesh.cp if inside else 1)
        tensor = cut(tensor, form.tp.dim, form.tp.blocks, place % mesh.tp, mesh.tp, run)
    return tensor


def at(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    for dim, (start, length) in enumerate(box):
        tensor = tensor.narrow(dim, start, length)
    return tensor


@given(crossings())
def test_each_rank_gets_what_it_needs_once(border: tuple[Crossing, int]) -> None:
    crossing, rows = border
    found = crossing.messages(rows)
    ends = Counter((m.source, m.target, m.tensor) for m in found)
    assert all(count == 1 for count in ends.values())
    for index, spec in enumerate(crossing.tensors):
        mine = [m for m in found if m.tensor == index]
        if crossing.backward and not spec.grad:
            assert not mine
            continue
        for rank in crossing.receiver.stage.mesh.devices:
            own = [m for m in mine if m.target == rank]
            replica = crossing.receiver.stage.mesh.devices.index(rank) // crossing.receiver.size
            if not replica_rows(crossing.receiver.stage, 6, rows)[replica]:
                assert not own
                continue
            wanted = held(spec, crossing.receiver, crossing.receiver.forms[index], rank, rows)
            assert crossing.shape(index, rank, rows) == tuple(wanted.shape)
            got, times = filled(crossing, own, spec, rows, tuple(wanted.shape))
            if crossing.backward and spec.batch_dim is None:
                assert torch.equal(got, wanted * times)
            else:
                assert torch.equal(got, wanted)
                assert (times == 1).all()


def filled(
    crossing: Crossing, own: list[Message], spec: TensorSpec, rows: int, shape: tuple[int, ...]
) -> tuple[torch.Tensor, torch.Tensor]:
    """What messages bring, and how often each element comes."""
    got, times = torch.zeros(shape, dtype=torch.float64), torch.zeros(shape)
    for message in own:
        form = crossing.sender.forms[message.tensor]
        there = held(spec, crossing.sender, form, message.source, rows)
        for take, put in zip(message.take, message.put, strict=True):
            at(got, put).add_(at(there, take))
            at(times, put).add_(1)
        assert message.elements == sum(at(there, box).numel() for box in message.take)
    return got, times


@given(crossings())
def test_gradients_of_a_shared_tensor_go_back_to_its_maker(border: tuple[Crossing, int]) -> None:
    crossing, rows = border
    there = replace(crossing, backward=False)
    back = Crossing(TENSORS, there.receiver, there.sender, 6, backward=True)

    def replica(side: Side, rank: int) -> int:
        return side.stage.mesh.devices.index(rank) // side.size

    forward, backward = (
        {
            frozenset(
                (name, replica(side, rank))
                for name, side, rank in (
                    (0 if way is there else 1, way.sender, message.source),
                    (1 if way is there else 0, way.receiver, message.target),
                )
            )
            for message in way.messages(rows)
            if TENSORS[message.tensor] is SHARED
        }
        for way in (there, back)
    )
    assert forward == backward
    assert bool(forward) == bool(rows)


def test_tp_ranks_pair_up() -> None:
    def side(first: int, tp: int) -> Side:
        return Side(Stage(0, 1, Mesh(tuple(range(first, first + tp)), tp=tp), ()), (UNCUT,))

    forward = Crossing((BATCHED,), side(0, 2), side(2, 4), 4, backward=False).messages(4)
    assert [(m.source, m.target) for m in forward] == [(0, 2), (1, 3), (0, 4), (1, 5)]
    back = Crossing((BATCHED,), side(2, 4), side(0, 2), 4, backward=True).messages(4)
    assert [(m.source, m.target) for m in back] == [(2, 0), (3, 1)]


def test_cut_sequences_send_only_the_parts() -> None:
    def side(first: int, tp: int, form: Placement) -> Side:
        return Side(Stage(0, 1, Mesh(tuple(range(first, first + tp)), tp=tp), ()), (Form(tp=form),))

    same = Crossing((BATCHED,), side(0, 2, Shard(1)), side(2, 2, Shard(1)), 4, backward=False)
    assert [(m.source, m.target, m.elements) for m in same.messages(4)] == [
        (0, 2, 4 * 6 * 4),
        (1, 3, 4 * 6 * 4),
    ]
    whole = Crossing((BATCHED,), side(0, 2, Shard(1)), side(2, 1, WHOLE), 4, backward=False)
    assert [(m.source, m.put[0][1]) for m in whole.messages(4)] == [(0, (0, 6)), (1, (6, 6))]


def test_a_sequence_that_both_axes_cut_comes_in_its_order() -> None:
    both = Side(Stage(0, 1, Mesh((0, 1, 2, 3), cp=2, tp=2), ()), (Form(Shard(1), Shard(1)),))
    alone = Side(Stage(0, 1, Mesh((4,)), ()), (UNCUT,))
    found = Crossing((BATCHED,), both, alone, 4, backward=False).messages(4)
    assert [(m.source, m.put[0][1]) for m in found] == [
        (0, (0, 3)),
        (1, (3, 3)),
        (2, (6, 3)),
        (3, (9, 3)),
    ]
    # What tp does not cut comes from one of its ranks.
    by_cp = replace(both, forms=(Form(cp=Shard(1)),))
    found = Crossing((BATCHED,), by_cp, alone, 4, backward=False).messages(4)
    assert [(m.source, m.put[0][1]) for m in found] == [(0, (0, 6)), (2, (6, 6))]


def test_samples_that_mix_with_something_else_are_not_cut() -> None:
    mixed = TensorSpec("cat", (Size(2, 1),), torch.float32, True)
    one, two = (
        Side(Stage(0, 1, Mesh(devices, dp_replicate=len(devices)), ()), (UNCUT,))
        for devices in ((0,), (1, 2))
    )
    with pytest.raises(InputError, match="cat has a dim that mixes samples"):
        Crossing((mixed,), one, two, 4, backward=False)
    (message,) = Crossing((mixed,), one, one, 4, backward=False).messages(4)
    assert message.take == message.put == (((0, 6),),)
