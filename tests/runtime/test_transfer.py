from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlplace.errors import InputError
from rlplace.plan.types import Mesh
from rlplace.runtime.boundary import Size, TensorSpec
from rlplace.runtime.transfer import check_cuttable, messages

BATCHED = TensorSpec("x", (Size(0, 1), Size(3)), torch.float32, True)
FLAT = TensorSpec("flat", (Size(0, 5),), torch.float32, True)
SHARED = TensorSpec("bias", (Size(4),), torch.float32, True)
IDS = TensorSpec("ids", (Size(0, 1),), torch.int64, False)

DEGREES = st.tuples(st.sampled_from([1, 2, 3, 4]), st.sampled_from([1, 2]))


def mesh(first: int, dp: int, tp: int) -> Mesh:
    return Mesh(tuple(range(first, first + dp * tp)), dp_replicate=dp, tp=tp)


@given(DEGREES, DEGREES, st.sampled_from([12, 24]), st.booleans())
def test_every_sample_arrives_once(
    sender: tuple[int, int], receiver: tuple[int, int], samples: int, backward: bool
) -> None:
    source, target = mesh(0, *sender), mesh(100, *receiver)
    found = messages([BATCHED, FLAT], source, target, samples, backward)
    assert [message.number for message in found] == list(range(len(found)))
    for tensor in (0, 1):
        for rank in target.devices:
            own = [m for m in found if m.target == rank and m.tensor == tensor]
            replica = target.devices.index(rank) // target.tp
            here, there = samples // target.dp, samples // source.dp
            seen: list[int] = []
            for message in own:
                maker = source.devices.index(message.source) // source.tp
                take = message.take or (0, there)
                put = message.put or (0, here)
                assert take[1] - take[0] == put[1] - put[0]
                assert maker * there + take[0] == replica * here + put[0]
                seen += range(*put)
            assert sorted(seen) == list(range(here))


@given(DEGREES, DEGREES)
def test_a_tensor_without_samples_has_one_maker_and_all_its_gradients(
    earlier: tuple[int, int], later: tuple[int, int]
) -> None:
    source, target = mesh(0, *earlier), mesh(100, *later)
    forward = messages([SHARED], source, target, 24, backward=False)
    back = messages([SHARED], target, source, 24, backward=True)
    assert sorted(m.target for m in forward) == list(target.devices)
    for t in range(source.tp):
        makers = source.devices[t :: source.tp]
        readers = [m.source for m in back if m.target in makers]
        assert len(readers) == len(set(readers)) == target.dp


def test_tp_ranks_pair_up() -> None:
    forward = messages([BATCHED], mesh(0, 1, 2), mesh(2, 1, 4), 4, backward=False)
    assert [(m.source, m.target) for m in forward] == [(0, 2), (1, 3), (0, 4), (1, 5)]
    back = messages([BATCHED], mesh(2, 1, 4), mesh(0, 1, 2), 4, backward=True)
    assert [(m.source, m.target) for m in back] == [(2, 0), (3, 1)]


def test_gradients_only_of_floats_that_need_one() -> None:
    found = messages([IDS, BATCHED], mesh(0, 1, 1), mesh(1, 1, 1), 4, backward=True)
    assert [message.tensor for message in found] == [1]


def test_a_dim_that_mixes_samples_is_refused() -> None:
    mixed = TensorSpec("cat", (Size(2, 1),), torch.float32, True)
    with pytest.raises(InputError, match="cat has a dim that mixes samples"):
        check_cuttable([mixed], 0)
