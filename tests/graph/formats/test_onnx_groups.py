from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rlplace.graph.formats.onnx_groups import MAX_GROUPS, Body, intervals


def chain(length: int, elements: int = 1) -> list[tuple[int, int, int, bool]]:
    return [(i, i + 1, elements, True) for i in range(length - 1)]


def test_a_chain_is_cut_between_its_anchors_at_the_smallest_tensor() -> None:
    spans = [(0, 1, 9, True), (1, 2, 3, True), (2, 3, 9, True)]
    assert intervals(Body([0, 3], spans, 4)) == [(0, 2), (2, 4)]


def test_an_activation_stays_with_what_it_is_applied_to() -> None:
    assert intervals(Body([0, 2], chain(3), 3)) == [(0, 1), (1, 3)]
    assert intervals(Body([0, 2], chain(3), 3, frozenset({1}))) == [(0, 2), (2, 3)]


def test_a_branch_stays_together() -> None:
    # 0 feeds 1 and 3 (a skip), 1 feeds 2, 2 feeds 3, 3 feeds 4.
    spans = [(0, 3, 1, True), (1, 2, 1, True), (2, 3, 1, True), (3, 4, 1, True)]
    assert intervals(Body([1, 2, 4], spans, 5)) == [(0, 4), (4, 5)]


def test_a_mask_that_everybody_reads_is_no_branch() -> None:
    spans = [*chain(6), (0, 5, 1, False)]
    assert len(intervals(Body([1, 3, 5], spans, 6))) == 3


def test_very_many_anchors_are_cut_in_spite_of_a_skip() -> None:
    spans = [*chain(40), (0, 39, 1, True)]
    assert len(intervals(Body(range(40), spans, 40))) == 40


@given(st.integers(1, 500), st.integers(1, 7))
def test_intervals_cover_the_body_and_stay_few(size: int, step: int) -> None:
    found = intervals(Body(range(0, size, step), chain(size), size))
    assert [start for start, _ in found] == [0, *(stop for _, stop in found[:-1])]
    assert found[-1][1] == size
    assert all(start < stop for start, stop in found)
    assert len(found) <= MAX_GROUPS
