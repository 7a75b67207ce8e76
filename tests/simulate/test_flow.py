"""Flows of schedules."""

from __future__ import annotations

from rlplace.plan.schedules import in_flight, lane_orders
from rlplace.simulate.flow import flow


def test_a_flow_is_made_once_and_from_lists_the_same() -> None:
    owner = (0, 1, 2)
    found = flow("1f1b", owner, 4)
    assert flow("1f1b", owner, 4) is found
    assert found.held == in_flight("1f1b", owner, 4) == (3, 2, 1)
    lists = lane_orders("1f1b", owner, 4)
    explicit = flow("explicit", owner, 4, lists)
    assert (explicit.peaks, explicit.held) == (found.peaks, found.held)
    assert explicit.order.stage.tolist() == found.order.stage.tolist()
