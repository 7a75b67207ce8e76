"""What a device holds when it holds most."""

from __future__ import annotations

import pytest

from rlplace.plan.orders import parse_lane, peaks
from rlplace.simulate.peaks import OPTIMIZER, lane_use
from rlplace.simulate.stages import StageCost
from rlplace.simulate.types import MemoryUse


def _cost(saved: float, transient: float, logits: float = 0.0, step: float = 0.0) -> StageCost:
    return StageCost(
        *(0, 0, 0, 0, 0, 0, 0, saved, transient), saved_logits=logits, optimizer_transient=step
    )


_PARTS = [
    MemoryUse(params=10, gradients=5, reserve=1),
    MemoryUse(params=20, optimizer=7, reserve=1),
]
#: Stages 0 and 1 on one lane: the second forward of stage 0 comes with nothing held of stage 1.
_LANE = parse_lane("0F0 1F0 1B0 0F1 0B0 0B1 1F1 1B1")


def test_stages_of_a_lane_do_not_peak_at_once() -> None:
    """Two of stage 0, or one of each; never two of stage 0 and one of stage 1."""
    moments = peaks(_LANE)
    use, phase = lane_use(_PARTS, moments, [_cost(100, 1), _cost(50, 3, logits=20)])
    assert (use.params, use.gradients, use.optimizer, use.reserve) == (30, 5, 7, 1)
    assert (use.activations, use.logits, use.transient) == (200, 0, 1)
    assert phase == "backward of micro-batch 0 (stage 0)"
    use, phase = lane_use(_PARTS, moments, [_cost(100, 1), _cost(150, 3, logits=20)])
    assert (use.activations, use.logits, use.transient) == (230, 20, 3)
    assert phase == "backward of micro-batch 0 (stage 1)"


def test_what_comes_and_goes_decides_where_as_much_is_held() -> None:
    moments = peaks(_LANE)
    use, _ = lane_use(_PARTS, moments, [_cost(100, 0), _cost(100, 9)])
    assert (use.activations, use.transient) == (200, 9)
    use, _ = lane_use(_PARTS, moments, [_cost(100, 9), _cost(100, 0)])
    assert (use.activations, use.transient) == (200, 9)


def test_the_optimizer_step_holds_no_activations() -> None:
    use, phase = lane_use(_PARTS, peaks(_LANE), [_cost(1, 1, step=40), _cost(1, 1, step=60)])
    assert phase == OPTIMIZER
    assert (use.activations, use.logits, use.transient) == (0, 0, 100)
    assert use.total == 30 + 5 + 7 + 100 + 1
    assert use.cached == 3, "what the backward pass held before"


def test_buffers_of_the_optimizer_step_stay_with_the_allocator() -> None:
    use, _ = lane_use(_PARTS, peaks(_LANE), [_cost(100, 1, step=40), _cost(1, 1, step=60)])
    assert (use.activations, use.cached) == (200, 100)
    own = use.held + use.transient
    assert use.within(2.0, 0.1, 0.5).cached == 100 + 0.5 * own
    assert use.within(2.0, 0.1, 0.5).total == pytest.approx(2 + 1.1 * own)
