from __future__ import annotations

import pytest

from rlplace.runtime.states_check import deviations

pytestmark = pytest.mark.dist


def test_every_level_is_what_fully_shard_computes() -> None:
    levels = [(0, 0, 0), (1, 1, 1), (2, 2, 2), (3, 3, 3), (3, 0, 2), (1, 3, 3)]
    found = deviations(levels, 3, 60.0)
    assert len(found) == len(levels)
    assert max(found) < 1e-12
