from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rlplace.graph.flow import Flow, only_added_into, staying


def flow(reads: set[int], writes: set[int], *, stays: bool = False, adds: bool = False) -> Flow:
    return Flow(frozenset(reads), frozenset(writes), stays, adds)


# given 0 -> norm 1 -> matmul 2 -> gelu 3 -> matmul 4 -> sum 5
CHAIN = [
    flow({0}, {1}),
    flow({1}, {2}, stays=True),
    flow({2}, {3}),
    flow({3}, {4}, stays=True),
    flow({0, 4}, {5}),
]


def test_what_is_saved_or_read_to_redo_what_is_saved_stays() -> None:
    assert staying(CHAIN, {0, 1, 2, 3}, {0}) == {2}
    assert staying(CHAIN, {3}, {0}) == {2}, "read to redo the gelu"
    assert staying(CHAIN, {5}, {0}) == {4}
    assert staying(CHAIN, {1}, {0}) == set()


def test_what_is_written_twice_is_made_of_both() -> None:
    """A value is made by a copy and changed in place afterwards."""
    flows = [flow({0}, {1}, stays=True), flow({0}, {2}), flow({1, 2}, {2})]
    assert staying(flows, {2}, {0}) == {1}


@st.composite
def passes(draw: st.DrawFn) -> tuple[list[Flow], set[int]]:
    """Calls that write 5, 6 and so on, and what is saved of them; 0 to 4 are given."""
    ends = range(5, 5 + draw(st.integers(1, 10)))
    flows = [
        flow(draw(st.sets(st.integers(0, end - 1))), {end}, stays=draw(st.booleans()))
        for end in ends
    ]
    return flows, draw(st.sets(st.sampled_from(ends)))


@given(passes())
def test_what_stays_is_enough_to_make_what_is_saved_and_nothing_is_spare(
    made: tuple[list[Flow], set[int]],
) -> None:
    flows, saved = made

    def can_be_made(kept: set[int]) -> set[int]:
        there = set(range(5)) | kept
        for each in flows:
            if not each.stays and each.reads <= there:
                there |= each.writes
        return there

    stay = staying(flows, saved, range(5))
    assert saved <= can_be_made(stay)
    assert all(not saved <= can_be_made(stay - {one}) for one in stay)


def test_only_what_is_added_into_gradients_of_parameters_is_for_them() -> None:
    # products 1 and 2 -> sum 3, the gradient of a parameter; 4 is read by a product as well
    flows = [flow({1, 2}, {3}, adds=True), flow({4}, {3}, adds=True), flow({4, 0}, {5})]
    found = only_added_into(flows, ends={3}, others={5})
    assert {1, 2, 3} <= found
    assert not {0, 4, 5} & found


def test_the_gradient_of_an_activation_is_none_though_a_bias_adds_it_up() -> None:
    found = only_added_into([flow({1}, {2}, adds=True)], ends={2}, others={1})
    assert found == {2}


def test_a_chain_that_ends_in_an_activation_is_not_for_parameters() -> None:
    flows = [flow({1}, {2}, adds=True), flow({2}, {3}, adds=True)]
    assert only_added_into(flows, ends={9}, others={3}) == {9}
