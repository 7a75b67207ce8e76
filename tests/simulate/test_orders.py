"""Action lists as arrays."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given

from rlplace.plan.orders import Lanes, dependencies, parse_orders
from rlplace.plan.schedules import lane_orders
from rlplace.simulate.orders import BACKWARD, FORWARD, INPUT_BACKWARD, WEIGHT_BACKWARD, orders
from tests.plan.test_orders import problems


def test_lists_in_arrays() -> None:
    order = orders(lane_orders("1f1b", (0, 1), 2))
    assert order.turns.first.tolist() == [0, 4, 8]
    assert order.stage.tolist() == [0] * 4 + [1] * 4
    assert order.kind.tolist() == [0, 0, 1, 1, 0, 1, 0, 1]
    assert order.micro_batch.tolist() == [0, 1, 0, 1, 0, 0, 1, 1]
    assert not order.split.any()


def test_a_backward_is_in_two_parts_where_there_is_a_second_one() -> None:
    order = orders(parse_orders("0F0 0B0 0W0 0F1 0B1"))
    assert order.kind.tolist() == [FORWARD, INPUT_BACKWARD, WEIGHT_BACKWARD, FORWARD, BACKWARD]
    assert order.split.tolist() == [False], "the last gradients come from a whole one"
    assert orders(parse_orders("0F0 0B0 0W0")).split.tolist() == [True]


@given(problems())
def test_turns_come_after_what_they_read(problem: tuple[Lanes, list[int], int]) -> None:
    lanes, owner, _ = problem
    order, stages = orders(lanes), len(owner)
    turns, flat = order.turns, [action for lane in lanes for action in lane]
    at = {action: int(turns.turn[row]) for row, action in enumerate(flat)}
    assert sorted(at.values()) == list(range(len(flat)))
    for action, turn in at.items():
        assert turns.lane[turn] == owner[action.stage]
        assert turns.price[turn] % stages == action.stage
        for need in dependencies(action, stages):
            assert at[need] < turn
            if need.kind != "W" and owner[need.stage] != owner[action.stage]:
                assert turns.target[at[need]] == turn
                assert turns.cut[at[need]] == min(need.stage, action.stage)
                link = owner[need.stage] * len(lanes) + owner[action.stage]
                assert turns.link[at[need]] == link
    sent = sum(owner[need.stage] != owner[a.stage] for a in at for need in dependencies(a, stages))
    assert np.count_nonzero(turns.target >= 0) == sent
    for stage, turn in enumerate(turns.last.tolist()):
        makers = [a for a in at if a.stage == stage and a.kind in "BW"]
        assert turn == max(at[a] for a in makers if order.kind[flat.index(a)] != INPUT_BACKWARD)


def test_a_deadlock_is_refused() -> None:
    """Stage 0 wants a backward before the forward that it depends on."""
    with pytest.raises(ValueError, match="deadlocks: 4 actions"):
        orders(parse_orders("0B0 0F0\n1F0 1B0"))
    with pytest.raises(ValueError, match="deadlocks: 3 actions"):
        orders(parse_orders("0F0 0B1\n1F1 1F0"))
