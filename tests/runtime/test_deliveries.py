from __future__ import annotations

from collections import defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlplace.plan.orders import parse_orders
from rlplace.plan.schedules import Orders, lane_orders
from rlplace.runtime.deliveries import Delivery, deliveries, mail

OWNERS = {
    "gpipe": (0, 1, 2, 3),
    "1f1b": (0, 1, 2, 3),
    "interleaved": (0, 1, 0, 1, 0, 1),
    "zb-h1": (0, 1, 2),
    "zb-v": (0, 1, 2, 2, 1, 0),
}


@pytest.mark.parametrize("name", OWNERS)
@pytest.mark.parametrize("micro_batches", [2, 8])
def test_every_border_is_crossed_both_ways(name: str, micro_batches: int) -> None:
    owner = OWNERS[name]
    orders = lane_orders(name, owner, micro_batches)
    found = deliveries(orders)
    assert len(found) == 2 * (len(owner) - 1) * micro_batches
    for one in found:
        made, needed = orders[one.source][one.sent], orders[one.target][one.awaited]
        assert made.micro_batch == needed.micro_batch == one.micro_batch
        assert made.kind == needed.kind == ("B" if one.backward else "F")
        assert {made.stage, needed.stage} == {one.border - 1, one.border}


class Lanes:
    """Lanes that go on one by one, with messages that leave only when they are received.

    A lane that waits for a delivery, or for its own to leave, does not go on until it is so.
    """

    def __init__(self, orders: Orders) -> None:
        self.orders, self.every = orders, [mail(orders, lane) for lane in range(len(orders))]
        self.at = [0] * len(orders)
        self.sent: dict[tuple[int, int], list[Delivery]] = defaultdict(list)
        self.posted: dict[tuple[int, int], list[Delivery]] = defaultdict(list)

    @property
    def left(self) -> list[int]:
        """Lanes that have actions left."""
        return [lane for lane, own in enumerate(self.orders) if self.at[lane] < len(own)]

    def through(self, one: Delivery) -> bool:
        """Both ends are at it, and at all before it: NCCL keeps the order of a pair."""
        here, there = self.sent[one.source, one.target], self.posted[one.source, one.target]
        return one in here and one in there and here.index(one) == there.index(one)

    def awaited(self, lane: int) -> list[Delivery]:
        """What the next action of a lane waits for; posts what it has to."""
        needed = self.every[lane].arrivals.get(self.at[lane])
        if needed is None:
            return []
        posted = self.posted[needed.source, lane]
        coming = self.every[lane].incoming[needed.source]
        posted += [one for one in coming if one.sent <= needed.sent and one not in posted]
        return [needed, *self.every[lane].gone[self.at[lane]]]

    def step(self, lane: int) -> bool:
        """Run the next action of a lane; whether it could."""
        if not all(self.through(one) for one in self.awaited(lane)):
            return False
        for one in deliveries(self.orders):
            if (one.source, one.sent) == (lane, self.at[lane]):
                self.sent[lane, one.target].append(one)
        self.at[lane] += 1
        return True


def run(orders: Orders, choose: st.DataObject) -> None:
    """Run all lanes to the end, in any order."""
    lanes = Lanes(orders)
    while lanes.left:
        ordered = choose.draw(st.permutations(lanes.left))
        assert any(lanes.step(lane) for lane in ordered), "all lanes wait"


@given(st.data(), st.sampled_from(sorted(OWNERS)))
def test_no_lane_waits_for_ever(choose: st.DataObject, name: str) -> None:
    run(lane_orders(name, OWNERS[name], 2), choose)


@given(st.data())
def test_other_orders(choose: st.DataObject) -> None:
    """The second is run by no lanes, which shows that `run` would notice."""
    run(parse_orders("0F1 0F0 2F0 2F1 2B0 2B1 0B0 0B1\n1F1 1F0 1B0 1B1"), choose)
    with pytest.raises(AssertionError, match="all lanes wait"):
        run(parse_orders("0F0 0B0 0F1 0B1\n1F1 1F0 1B0 1B1"), choose)


def test_what_has_gone_was_received_before() -> None:
    orders = lane_orders("1f1b", (0, 1), 4)
    own = mail(orders, 0)
    gone = {
        str(orders[0][position]): [one.micro_batch for one in found]
        for position, found in own.gone.items()
    }
    assert gone == {"0B0": [0], "0B1": [1], "0B2": [2], "0B3": [3]}
    later = mail(orders, 1)
    assert sum(len(found) for found in later.gone.values()) == 2
    assert all(one.backward for found in later.gone.values() for one in found)
