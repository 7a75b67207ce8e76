from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlplace.errors import InputError
from rlplace.graph.formats.parse import FileEdge, assemble, same_length


@st.composite
def shuffled_dags(draw: st.DrawFn) -> tuple[int, list[tuple[int, int]]]:
    """Nodes, and edges of a graph without cycles whose nodes are in any order."""
    nodes = draw(st.integers(1, 9))
    rank = draw(st.permutations(range(nodes)))
    pairs = st.tuples(st.integers(0, nodes - 1), st.integers(0, nodes - 1))
    drawn = draw(st.lists(pairs.filter(lambda pair: pair[0] != pair[1]), max_size=20))
    return nodes, sorted({(a, b) if rank[a] < rank[b] else (b, a) for a, b in drawn})


@given(shuffled_dags())
def test_every_edge_of_any_dag_points_forward_and_nothing_is_lost(
    dag: tuple[int, list[tuple[int, int]]],
) -> None:
    nodes, pairs = dag
    names = [f"n{i}" for i in range(nodes)]
    made = assemble("g", names, [FileEdge(a, b) for a, b in pairs], [0] * nodes)
    assert sorted(made.positions) == list(range(nodes))
    assert all(edge.src < edge.dst for edge in made.graph.edges)
    back = [(made.positions[e.src], made.positions[e.dst]) for e in made.graph.edges]
    assert back == pairs
    assert [made.graph.groups[made.groups[i]].name for i in range(nodes)] == names


def test_a_topological_order_is_kept() -> None:
    made = assemble("g", ["a", "b", "c"], [FileEdge(0, 2), FileEdge(1, 2)], [1, 2, 1])
    assert made.positions == (0, 1, 2)
    assert [group.structure for group in made.graph.groups] == [0, 1, 0]


def test_costs_reach_the_fingerprint() -> None:
    one, two = (assemble("g", ["a"], [], [cost]).graph for cost in (1.0, 2.0))
    assert one.fingerprint != two.fingerprint


def test_equal_names_get_a_number() -> None:
    made = assemble("g", ["tensor", "tensor"], [], [0, 0])
    assert [group.name for group in made.graph.groups] == ["tensor", "tensor#2"]


def test_a_cycle_is_named() -> None:
    edges = [FileEdge(0, 1), FileEdge(1, 2), FileEdge(2, 0)]
    with pytest.raises(InputError, match=r"a -> b -> c -> a.*cycle"):
        assemble("g", ["a", "b", "c"], edges, [0] * 3)


@pytest.mark.parametrize(
    ("edges", "rule"),
    [
        ([FileEdge(0, 5)], "does not exist"),
        ([FileEdge(0, -1)], "does not exist"),
        ([FileEdge(1, 1)], "feed itself"),
        ([FileEdge(0, 1), FileEdge(0, 1)], "given twice"),
    ],
)
def test_bad_edges_are_refused(edges: list[FileEdge], rule: str) -> None:
    with pytest.raises(InputError, match=rule):
        assemble("g", ["a", "b"], edges, [0, 0])


def test_a_graph_without_nodes_is_refused() -> None:
    with pytest.raises(InputError, match="at least one node"):
        assemble("g", [], [], [])


def test_same_length_names_the_list() -> None:
    with pytest.raises(InputError, match="length of comm=1"):
        same_length("g", 2, comm=[1])
