"""The program over stages against every pipeline."""

from __future__ import annotations

from itertools import pairwise, product

import numpy as np
import pytest

from rlplace.planners.stage_program import pipelines


@pytest.mark.parametrize("count", [1, 4, 1e9])
def test_pipelines_are_the_best_of_all(count: float) -> None:
    """Three cuts in a line, two shapes: every pipeline by hand."""
    for seed in range(8):
        rng = np.random.default_rng(seed)
        table, sizes = rng.uniform(1.0, 5.0, (2, 3, 4, 4)), [1, 2]
        least = float("inf")
        for stages in (1, 2, 3):
            for cuts in product(range(1, 3), repeat=stages - 1):
                bounds = (0, *cuts, 3)
                if any(a >= b for a, b in pairwise(bounds)):
                    continue
                for shapes in product(range(2), repeat=stages):
                    # Two devices in all.
                    if sum(sizes[shape] for shape in shapes) > 2:
                        continue
                    own = [
                        table[shape, stages - 1 - i, bounds[i], bounds[i + 1]]
                        for i, shape in enumerate(shapes)
                    ]
                    least = min(least, sum(own) + (count - 1) * max(own))
        best = pipelines(table, sizes, 2, count)[0]
        own = [table[j, len(best) - 1 - i, a, b] for i, (a, b, j) in enumerate(best)]
        assert sum(own) + (count - 1) * max(own) <= 1.003 * least


def test_where_a_group_has_no_stage_there_is_no_pipeline() -> None:
    assert pipelines(np.full((1, 2, 3, 3), np.inf), [1], 2, 4) == []
    # The stage with one behind is known only at the front.
    table = np.full((1, 2, 3, 3), np.inf)
    table[0, 1, 0, 1] = table[0, 0, 1, 2] = 1.0
    assert pipelines(table, [1], 2, 4) == [[(0, 1, 0), (1, 2, 0)]]
    assert pipelines(table, [1], 1, 4) == []
