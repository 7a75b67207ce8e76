"""Ways to split a global batch."""

from __future__ import annotations

import numpy as np
import pytest

from rlplace.simulate.bounds.splits import splits


@pytest.mark.parametrize(("batch", "devices"), [(1, 1), (6, 4), (12, 100), (64, 8)])
def test_every_split_is_there_once(batch: int, devices: int) -> None:
    cut = splits(batch, devices, (0, 1, 3))
    rows = set(
        zip(
            cut.sizes[cut.size].astype(int).tolist(),
            cut.replicas.tolist(),
            cut.shards.tolist(),
            cut.zero.tolist(),
            cut.count.tolist(),
            strict=True,
        )
    )
    assert len(rows) == len(cut.count)
    every = {
        (size, replicas, shards, zero, count)
        for size in range(1, batch + 1)
        for count in range(1, batch // size + 1)
        for replicas in range(1, devices + 1)
        if size * count * replicas == batch
        for shards in range(1, replicas + 1)
        if replicas % shards == 0
        for zero in ((0,) if shards == 1 else (1, 3))
    }
    assert rows == every


def test_the_least_of_each_number_of_micro_batches() -> None:
    cut = splits(4, 4, (0, 1, 2, 3))
    counts = cut.count[cut.first]
    assert counts.tolist() == [1, 2, 4]
    values = np.arange(2.0 * len(cut.count)).reshape(2, -1)
    assert cut.least(values).tolist() == cut.first.tolist()
