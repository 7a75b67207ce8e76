from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from rlplace.errors import InputError
from rlplace.graph import library
from rlplace.graph.neighbours import context_layouts, disagreement, sequence_layouts
from rlplace.graph.types import Layout, OpGraph, Shard

TRANSFORMERS = ["gpt", "llama"]


@pytest.fixture(scope="module", params=TRANSFORMERS)
def transformer(request: pytest.FixtureRequest) -> OpGraph:
    """Heads that 8 divides, a vocabulary that only 2 divides."""
    shape: dict[str, Any] = {
        "layers": 2,
        "hidden": 64,
        "heads": 8,
        "ffn": 128,
        "vocab": 130,
        "seq_len": 16,
    }
    if request.param == "llama":
        shape["kv_heads"] = 8
    return library.build(request.param, tie_embeddings=False, **shape)


@pytest.mark.parametrize("degree", [2, 4, 8])
def test_sequences_stay_cut_from_the_embedding_to_the_loss(
    transformer: OpGraph, degree: int
) -> None:
    layouts = sequence_layouts(transformer, degree)

    assert [layout.name for layout in layouts] == ["sequence"] * len(transformer.groups)
    assert {layout.degree for layout in layouts} == {degree}
    assert disagreement(transformer, dict(enumerate(layouts))) is None
    for edge in transformer.edges:
        assert layouts[edge.dst].reads == layouts[edge.src].writes == (Shard(1),)
    middle = layouts[1:-1]
    assert all(
        layout.work.params < transformer.structure(1 + i).work.params
        for i, layout in enumerate(middle)
    )


@pytest.mark.parametrize("degree", [2, 4, 8])
def test_context_layouts_fit_as_well(transformer: OpGraph, degree: int) -> None:
    layouts = context_layouts(transformer, degree)

    assert {(layout.name, layout.axis) for layout in layouts} == {("context", "cp")}
    assert disagreement(transformer, dict(enumerate(layouts))) is None


def test_a_whole_axis_replicates(transformer: OpGraph) -> None:
    for choose in (sequence_layouts, context_layouts):
        assert {layout.name for layout in choose(transformer, 1)} == {"replicate"}


@pytest.mark.parametrize("degree", [3, 5, 16])
def test_a_degree_that_the_model_does_not_have_is_refused(
    transformer: OpGraph, degree: int
) -> None:
    with pytest.raises(InputError, match=r"does not divide|cannot cut"):
        sequence_layouts(transformer, degree)
    with pytest.raises(InputError, match=r"has sequences that cp cannot cut"):
        context_layouts(transformer, degree)


@pytest.mark.parametrize(
    "name", ["t5-tiny", "whisper-tiny", "clip-tiny", "resnet-tiny", "dlrm-tiny"]
)
def test_groups_without_sequences_to_cut_run_whole(name: str) -> None:
    graph = library.build(name)
    for layouts, cut in (
        (sequence_layouts(graph, 2), "sequence"),
        (context_layouts(graph, 2), "context"),
    ):
        assert disagreement(graph, dict(enumerate(layouts))) is None
        for group, layout in zip(graph.groups, layouts, strict=True):
            names = {found.name for found in graph.structure(group.index).bordered}
            assert (layout.name == cut) == (cut in names)


def test_neighbours_that_do_not_fit_are_named(transformer: OpGraph) -> None:
    layouts = list(sequence_layouts(transformer, 2))
    layouts[2] = Layout("replicate", 2, transformer.structure(2).work)
    edge = disagreement(transformer, dict(enumerate(layouts)))
    assert edge is not None
    assert (edge.src, edge.dst) == (1, 2)

    last = transformer.groups[-1].structure
    structures = list(transformer.structures)
    structures[last] = replace(structures[last], bordered=())
    broken = replace(transformer, structures=tuple(structures))
    with pytest.raises(InputError, match="lm_head does not read"):
        sequence_layouts(broken, 2)
