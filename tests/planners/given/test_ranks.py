from __future__ import annotations

import numpy as np
import pytest

from rlplace.cost.given.event_loop import event_arrays
from rlplace.graph.formats.giph import read_giph
from rlplace.planners.given.ranks import (
    downward_rank,
    mean_times,
    mean_transfers,
    producers,
    upward_rank,
)
from tests.graph.formats.examples import giph
from tests.planners.given.cases import random_giph

ARRAYS = event_arrays(read_giph(giph(), "0/0"))


def test_means_by_hand() -> None:
    # Op 1 runs on the first device only; a byte takes 0.5 one way and 0.25 back, after 3.
    assert mean_times(ARRAYS) == pytest.approx([1.5, 4.0, 3.0, 1.5])
    assert mean_transfers(ARRAYS) == pytest.approx([6.0, 4.5, 3.75, 4.5])


def test_ranks_by_hand() -> None:
    assert upward_rank(ARRAYS) == pytest.approx([16.75, 9.25, 9.0, 1.5])
    assert downward_rank(ARRAYS) == pytest.approx([0.0, 7.5, 6.0, 15.25])
    assert producers(ARRAYS) == [[], [(0, 8.0)], [(0, 4.0)], [(1, 2.0), (2, 4.0)]]


def test_the_longest_path_through_any_op_is_no_longer_than_the_longest_path() -> None:
    arrays = event_arrays(random_giph(np.random.default_rng(0), 40, 4))
    up, down = upward_rank(arrays), downward_rank(arrays)
    assert (up + down).max() == pytest.approx(up.max())
