"""What crosses a border where replicas have different samples."""

import pytest

from rlplace.cost.exchanges import crossing_samples
from rlplace.plan.types import Mesh, Stage


def stage(dp: int, *shares: int) -> Stage:
    return Stage(0, 1, Mesh(tuple(range(dp)), dp), (), shares)


@pytest.mark.parametrize(
    ("before", "after", "samples"),
    [
        (stage(2), stage(4), 8),
        (stage(2, 4, 4), stage(2), 8),
        (stage(2, 6, 2), stage(2), 12),
        (stage(2), stage(2, 1, 7), 14),
        (stage(1), stage(2, 6, 2), 8),  # one sender has all of it in any case
        (stage(2), stage(4, 5, 1, 1, 1), 10),  # one of four gets more than each of two sends
        (stage(2), stage(4, 3, 3, 1, 1), 8),  # it gets less
    ],
)
def test_the_busiest_replica_counts(before: Stage, after: Stage, samples: float) -> None:
    assert crossing_samples(before, after, 8) == samples
