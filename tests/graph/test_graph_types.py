from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from rlplace.graph.types import (
    Affine,
    Cut,
    Edge,
    Group,
    Layout,
    OpGraph,
    Partial,
    Placement,
    Replicate,
    Shard,
    Structure,
    Work,
)

integers = st.integers(-(2**30), 2**30)


@given(integers, integers, st.integers(1, 1000))
def test_affine_goes_through_its_points(base: int, slope: int, batch: int) -> None:
    line = Affine.through(2, base + 2 * slope, 3, base + 3 * slope)
    assert line == Affine(base, slope)
    assert line(batch) == base + slope * batch


def test_affine_adds_and_scales() -> None:
    assert Affine(1, 2) + Affine(3, 4) * 2 == Affine(7, 10)


@pytest.mark.parametrize("placement", [Replicate(), Shard(1), Shard(0, blocks=3), Partial()])
def test_placements_stay_apart_in_a_file(placement: Placement) -> None:
    adapter: TypeAdapter[Placement] = TypeAdapter(Placement)
    assert adapter.validate_json(adapter.dump_json(placement)) == placement


@pytest.fixture
def graph() -> OpGraph:
    """Three groups in a chain; the first tensor is read by both others."""
    structures = (
        Structure("a", Work(flops=Affine(0, 6.0), params=10)),
        Structure("b", Work(params=20)),
    )
    groups = (
        Group(0, "embed", 0, params=("shared",)),
        Group(1, "mid", 1, params=("own",)),
        Group(2, "head", 0, params=("shared",)),
    )
    edges = (
        Edge(0, 1, "x", floats=Affine(0, 4)),
        Edge(0, 2, "x", floats=Affine(0, 4)),
        Edge(1, 2, "mask", other_bytes=Affine(2)),
    )
    return OpGraph("chain", groups, edges, structures, tied=(("shared", 10),))


def test_a_relayed_tensor_crosses_each_cut_once(graph: OpGraph) -> None:
    assert graph.crossings == (
        (Affine(), Affine()),
        (Affine(0, 4), Affine()),
        (Affine(0, 4), Affine(2)),
        (Affine(), Affine()),
    )


def test_tied_parameters_count_once(graph: OpGraph) -> None:
    assert graph.params == 30


def test_fingerprint_depends_on_everything(graph: OpGraph) -> None:
    layout = Layout("shard", 2, Work(), params=(Replicate(),))
    other = replace(layout, params=(Partial(),))
    prints = {graph.fingerprint, replace(graph, tokens_per_sample=2).fingerprint}
    for each in (layout, other):
        first = replace(graph.structures[0], layouts=(each,))
        prints.add(replace(graph, structures=(first, graph.structures[1])).fingerprint)
    assert len(prints) == 4


def test_replicate_is_a_layout_at_every_degree(graph: OpGraph) -> None:
    layout = Layout("shard", 2, Work(params=5))
    structure = replace(graph.structures[0], layouts=(layout,))
    assert structure.layouts_at(2) == (Layout("replicate", 2, structure.work), layout)
    assert structure.layouts_at(4) == (Layout("replicate", 4, structure.work),)


def _cutting(*sizes: int) -> Structure:
    cuts = tuple(Cut(f"part_{i}", size) for i, size in enumerate(sizes))
    return Structure(f"{sizes}", Work(flops=Affine(0.0, 1.0)), cuts=cuts)


def _model(*structures: Structure, uses: tuple[int, ...]) -> OpGraph:
    groups = tuple(Group(i, f"group.{i}", index) for i, index in enumerate(uses))
    return OpGraph("model", groups, (), structures)


def test_tp_degrees_divide_what_is_cut() -> None:
    few = _model(_cutting(28, 4, 3584), _cutting(18944), uses=(0, 1, 0, 1))
    assert few.tp_degrees(16) == (1, 2, 4)
    assert few.tp_refusal(8) == "tp=8 does not divide part_0 28, part_1 4 of group.0"
    assert few.tp_refusal(4) is None
    assert _model(_cutting(40, 10), uses=(0, 0)).tp_degrees(16) == (1, 2, 5, 10)


def test_what_does_not_repeat_limits_no_degree_of_the_layers() -> None:
    once = _model(_cutting(12), _cutting(51), uses=(0, 0, 1))
    assert once.tp_degrees(6) == (1, 2, 3, 4, 6)
    assert _model(_cutting(12), uses=(0,)).tp_degrees(3) == (1, 2, 3)
    assert _model(_cutting(8), _cutting(9), uses=(0, 1)).tp_degrees(8) == (1, 2, 4, 8)
    assert _model(Structure("", Work()), uses=(0,)).tp_degrees(3) == (1, 2, 3)
