"""Action lists: text, what waits for what, what is refused, and when a lane holds most."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlplace.errors import InputError
from rlplace.plan.orders import (
    Lanes,
    dependencies,
    format_orders,
    levels,
    parse_orders,
    peaks,
    refuse_orders,
)
from rlplace.plan.types import Action

_TWO = "0F0 0F1 0B0 0B1\n1F0 1B0 1F1 1B1"


def random_orders(seed: int, owner: list[int], micro_batches: int) -> Lanes:
    """Lists that can be run, as a random run made them; some backwards are in two parts."""
    rng = random.Random(seed)
    stages = len(owner)
    left = [
        Action(stage, kind, index)  # type: ignore[arg-type]  # letters of a text
        for stage in range(stages)
        for index in range(micro_batches)
        for kind in rng.choice(("FB", "FBW"))
    ]
    done: set[Action] = set()
    lanes: list[list[Action]] = [[] for _ in range(1 + max(owner))]
    while left:
        able = [a for a in left if done.issuperset(dependencies(a, stages))]
        action = rng.choice(able)
        left.remove(action)
        done.add(action)
        lanes[owner[action.stage]].append(action)
    return tuple(map(tuple, lanes))


@st.composite
def problems(draw: st.DrawFn) -> tuple[Lanes, list[int], int]:
    """Lists, the lane of each stage, and micro-batches."""
    stages, micro_batches = draw(st.integers(1, 5)), draw(st.integers(1, 4))
    owner = _canonical(draw(st.lists(st.integers(0, 3), min_size=stages, max_size=stages)))
    return random_orders(draw(st.integers(0, 10**6)), owner, micro_batches), owner, micro_batches


def _canonical(owner: list[int]) -> list[int]:
    number: dict[int, int] = {}
    return [number.setdefault(lane, len(number)) for lane in owner]


def test_text_there_and_back() -> None:
    orders = parse_orders(_TWO)
    assert orders[1][1] == Action(1, "B", 0)
    assert format_orders(orders) == _TWO
    with pytest.raises(InputError, match="an action is a stage") as caught:
        parse_orders("0F0 0X1")
    assert caught.value.value == "0X1"


def test_the_cells_that_torch_writes() -> None:
    """Empty cells are idle steps; ``I`` is a backward without gradients of parameters."""
    orders = parse_orders("0F0,,0I0,0W0\n\n,1F0,1B0\n")
    assert format_orders(orders) == "0F0 0B0 0W0\n1F0 1B0"


def test_what_waits_for_what() -> None:
    assert dependencies(Action(0, "F", 3), 2) == ()
    assert dependencies(Action(1, "F", 3), 2) == (Action(0, "F", 3),)
    assert dependencies(Action(1, "B", 3), 2) == (Action(1, "F", 3),)
    assert dependencies(Action(0, "B", 3), 2) == (Action(0, "F", 3), Action(1, "B", 3))
    assert dependencies(Action(0, "W", 3), 2) == (Action(0, "B", 3),)


@given(problems())
def test_a_level_is_behind_all_that_an_action_waits_for(
    problem: tuple[Lanes, list[int], int],
) -> None:
    lanes, owner, micro_batches = problem
    refuse_orders(lanes, owner, micro_batches)
    found = levels(lanes)
    level = {a: n for lane, own in zip(lanes, found, strict=True) for a, n in zip(lane, own)}  # noqa: B905
    for lane in lanes:
        assert all(level[a] < level[b] for a, b in pairwise(lane))
    for action, own in level.items():
        before = [level[need] for need in dependencies(action, len(owner))]
        lane = lanes[owner[action.stage]]
        if lane.index(action):
            before.append(level[lane[lane.index(action) - 1]])
        assert own == 1 + max(before, default=-1)


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("0F0 0F1 0B0 0B1", "one list for each lane"),
        (_TWO + " 1W2", "micro-batches 0 to 1"),
        (_TWO + " 2F0", "stages 0 to 1"),
        (_TWO + " 0W0", "stage 0 is on lane 0"),
        (_TWO + " 1F0", "occurs 2 times"),
        ("0F0 0F1 0B0\n1F0 1B0 1F1 1B1", "0B1 is missing"),
        ("0F0 0B0 0F1 0B1\n1F0 1F1 1B1 1B0", "cannot be run"),
    ],
)
def test_what_is_refused(text: str, rule: str) -> None:
    refuse_orders(parse_orders(_TWO), (0, 1), 2)
    with pytest.raises(InputError, match=rule):
        refuse_orders(parse_orders(text), (0, 1), 2)


def test_a_deadlock_names_what_is_blocked() -> None:
    """Stage 0 waits for the gradient of 0, which stage 1 makes after that of 1."""
    with pytest.raises(InputError, match="wait for actions behind one another") as caught:
        refuse_orders(parse_orders("0F0 0B0 0F1 0B1\n1F0 1F1 1B1 1B0"), (0, 1), 2)
    assert caught.value.value == "0B0, 1F1"


def test_peaks_by_hand() -> None:
    [own] = parse_orders("0F0 2F0 0F1 2B0 0B0 0B1 2F1 2B1")
    assert {(str(peak.action), peak.held) for peak in peaks(own)} == {
        ("0F1", ((0, 2), (2, 1))),
        ("2B0", ((0, 2), (2, 1))),
    }


def test_what_a_weight_backward_needs_is_held_until_it_has_run() -> None:
    [apart] = parse_orders("0F0 0B0 0F1 0B1 0W0 0W1")
    [whole] = parse_orders("0F0 0B0 0F1 0B1")
    assert [peak.held for peak in peaks(apart)] == [((0, 2),)]
    assert [peak.held for peak in peaks(whole)] == [((0, 1),)]
    assert peaks(whole)[0].action == Action(0, "B", 0), "a backward, where it holds as much"


@given(problems(), st.lists(st.integers(1, 9), min_size=5, max_size=5), st.data())
def test_no_moment_is_above_the_peaks(
    problem: tuple[Lanes, list[int], int], sizes: list[int], data: st.DataObject
) -> None:
    """Every moment's bytes: what is held, and what the stage that runs adds while it runs."""
    lanes = problem[0]
    extra = data.draw(st.lists(st.integers(0, 9), min_size=5, max_size=5))
    for lane in lanes:
        held: set[tuple[int, int]] = set()
        most = 0
        for action in lane:
            key = (action.stage, action.micro_batch)
            if action.kind == "F":
                held.add(key)
            most = max(most, sum(sizes[stage] for stage, _ in held) + extra[action.stage])
            apart = Action(action.stage, "W", action.micro_batch) in lane
            if action.kind == ("W" if apart else "B"):
                held.remove(key)
        assert not held
        assert most == max(
            sum(sizes[stage] * count for stage, count in peak.held) + extra[peak.action.stage]
            for peak in peaks(lane)
        )
