from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlplace.report.layered import Edge, Point, Size, depths, layered, separated

GAP = (0.4, 0.3)


@st.composite
def dags(draw: st.DrawFn) -> tuple[list[Size], list[Edge]]:
    count = draw(st.integers(1, 12))
    pairs = [(a, b) for a, b in combinations(range(count), 2)]
    edges = draw(st.lists(st.sampled_from(pairs), unique=True, max_size=24)) if pairs else []
    side = st.floats(0.3, 3.0)
    return [(draw(side), draw(side)) for _ in range(count)], sorted(edges)


@settings(max_examples=60, deadline=None)
@given(dags())
def test_boxes_never_overlap_and_edges_run_downwards_beside_them(
    case: tuple[list[Size], list[Edge]],
) -> None:
    sizes, edges = case
    drawing = layered(sizes, edges, GAP)
    for a, b in combinations(range(len(sizes)), 2):
        (xa, ya), (xb, yb) = drawing.centres[a], drawing.centres[b]
        aside = abs(xa - xb) - (sizes[a][0] + sizes[b][0]) / 2
        below = abs(ya - yb) - (sizes[a][1] + sizes[b][1]) / 2
        assert max(aside, below) > 0.1
    for source, target in edges:
        bends = drawing.bends.get((source, target), [])
        ys = [drawing.centres[source][1], *(y for _, y in bends), drawing.centres[target][1]]
        assert all(upper <= lower for upper, lower in pairwise(ys))
        assert len(bends) == 2 * (drawing.layers[target] - drawing.layers[source] - 1)
        for bend in bends:
            assert not any(
                _inside(bend, drawing.centres[box], size) for box, size in enumerate(sizes)
            )


def _inside(point: Point, centre: Point, size: Size) -> bool:
    return (
        abs(point[0] - centre[0]) < size[0] / 2 and abs(point[1] - centre[1]) < size[1] / 2 - 1e-9
    )


def test_a_chain_is_straight_whatever_passes_beside_it() -> None:
    edges = [(i, i + 1) for i in range(5)] + [(0, 3), (1, 5)]
    drawing = layered([(2.0, 0.5)] * 6, sorted(edges), GAP)
    xs = [x for x, _ in drawing.centres]
    assert max(xs) - min(xs) < 0.02
    for bends in drawing.bends.values():
        assert len({round(x, 6) for x, _ in bends}) == 1


def test_two_towers_stand_side_by_side() -> None:
    edges = [(0, 1), (1, 2), (3, 4), (4, 5), (2, 6), (5, 6)]
    drawing = layered([(2.0, 0.5)] * 7, edges, GAP)
    left = {round(drawing.centres[i][0], 3) for i in (0, 1, 2)}
    right = {round(drawing.centres[i][0], 3) for i in (3, 4, 5)}
    assert len(left) == len(right) == 1
    apart = abs(left.pop() - right.pop())
    assert apart == pytest.approx(2.4)
    assert drawing.layers == [0, 1, 2, 0, 1, 2, 3]


def test_a_source_stands_next_to_its_first_reader() -> None:
    assert depths(5, [(0, 1), (1, 2), (2, 4), (3, 4)]) == [0, 1, 2, 2, 3]


@given(
    st.lists(
        st.tuples(st.floats(-9, 9), st.floats(0.5, 4), st.floats(0, 2)), min_size=1, max_size=9
    )
)
def test_separated_keeps_the_distances_and_moves_as_little_as_it_must(
    items: list[tuple[float, float, float]],
) -> None:
    wanted, weights = [w for w, _, _ in items], [w for _, w, _ in items]
    spans = [span for _, _, span in items[1:]]
    placed = separated(wanted, weights, spans)
    for (a, b), span in zip(pairwise(placed), spans, strict=True):
        assert b - a >= span - 1e-6
    if all(b - a >= span for (a, b), span in zip(pairwise(wanted), spans, strict=True)):
        assert placed == pytest.approx(wanted, abs=1e-6)
    # The least-squares answer keeps the weighted mean.
    mean = sum(w * (p - q) for w, p, q in zip(weights, placed, wanted, strict=True))
    assert mean == pytest.approx(0.0, abs=1e-6)
