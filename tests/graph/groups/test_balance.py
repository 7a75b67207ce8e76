from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rlplace.graph.groups.alive import Position
from rlplace.graph.groups.balance import Costs, grown, limit, thin

WEIGHTS = st.lists(st.floats(0.1, 10.0), min_size=2, max_size=40)


def place(index: int, alive: int = 1, inside: bool = False) -> Position:
    return Position(alive, inside, 0, 0, False, index)


def everywhere(weights: list[float]) -> list[Position]:
    return [place(index) for index in range(1, len(weights))]


def dearest(cuts: list[Position], costs: Costs) -> float:
    return max(costs.of(start, stop) for start, stop in costs.spans(cuts))


@given(WEIGHTS, st.integers(1, 50))
def test_thin_joins_into_groups_whose_dearest_is_as_cheap_as_can_be(
    weights: list[float], most: int
) -> None:
    costs = Costs(weights)
    cuts = thin(everywhere(weights), costs, most)
    assert len(cuts) < most
    assert {cut.index for cut in cuts} <= set(range(1, len(weights)))
    assert dearest(cuts, costs) <= cheapest(costs, most) * (1 + 1e-6)


def cheapest(costs: Costs, most: int) -> float:
    """The dearest of at most `most` groups at its cheapest, by dynamic programming."""
    table = [0.0] + [float("inf")] * costs.end
    for _ in range(min(most, costs.end)):
        table = [
            min(max(table[start], costs.of(start, stop)) for start in range(stop + 1))
            for stop in range(costs.end + 1)
        ]
    return table[-1]


@given(WEIGHTS, st.integers(1, 50))
def test_grown_meets_the_number(weights: list[float], wanted: int) -> None:
    costs = Costs(weights)
    cuts = grown([], everywhere(weights), costs, lambda spans: len(spans) < wanted)
    assert len(cuts) + 1 == min(wanted, len(weights))
    assert cuts == sorted(cuts, key=lambda cut: cut.index)


def test_grown_cuts_the_dearest_group_where_the_fewest_tensors_are_alive() -> None:
    costs = Costs([1.0] * 4 + [2.0] * 4)
    spare = [place(2), place(5, alive=2), place(6), place(7)]
    (first, second) = grown([place(4)], spare, costs, lambda spans: len(spans) < 3)
    assert (first.index, second.index) == (4, 6)


def test_limit_drops_all_cuts_inside_repeated_elements_or_none() -> None:
    weights = [1.0] * 40
    cuts = [place(index, inside=index % 2 == 1) for index in range(1, 40)]
    costs = Costs(weights)
    assert limit(cuts, costs, 40, 5) == cuts
    assert [cut.index for cut in limit(cuts, costs, 39, 5)] == list(range(2, 40, 2))
    joined = limit(cuts, costs, 39, 30)  # 20 groups would be fewer than 30
    assert len(joined) < 39
