from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlplace.graph.sharding.shards import by_device, by_run, cut, join, padded

counts = st.integers(1, 3)


@settings(deadline=None, max_examples=40)
@given(size=counts, blocks=counts, length=counts, dim=st.integers(0, 2), grows=st.booleans())
def test_parts_join_to_the_whole(
    size: int, blocks: int, length: int, dim: int, grows: bool
) -> None:
    shape = [2, 3, 2]
    shape[dim] = blocks * size * length
    run = size * length if grows else 0
    whole = torch.arange(torch.Size(shape).numel()).view(shape)

    parts = [cut(whole, dim, 1 if grows else blocks, rank, size, run) for rank in range(size)]

    assert torch.equal(join(parts, dim, 1 if grows else blocks, run), whole)
    assert torch.equal(by_device(whole, dim, blocks, size), torch.cat(parts, dim))
    assert torch.equal(by_run(torch.cat(parts, dim), dim, blocks, size), whole)
    spread = [padded(part, dim, blocks, rank, size) for rank, part in enumerate(parts)]
    assert torch.equal(torch.stack(spread).sum(0), whole)


def test_rows_of_every_sequence_are_cut_on_their_own() -> None:
    rows = torch.arange(12)  # three sequences of four

    assert cut(rows, 0, 1, 0, 2, run=4).tolist() == [0, 1, 4, 5, 8, 9]
    assert cut(rows, 0, 1, 1, 2, run=4).tolist() == [2, 3, 6, 7, 10, 11]
