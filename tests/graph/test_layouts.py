from __future__ import annotations

import os
import subprocess
import sys
from functools import partial
from typing import Any

import pytest

from rlplace.errors import InputError
from rlplace.graph.layouts import (
    activations_of,
    borders_of,
    find_bordered,
    find_layouts,
    legal_degrees,
    placements_of,
    solve,
)
from rlplace.graph.sharding.borders import WHOLE
from rlplace.graph.types import Layout, Placement, Replicate, Shard
from rlplace.runtime.shard_check import Case, deviation
from tests.graph import sharded_pieces
from tests.graph.thread_axis import on_threads


@pytest.fixture(scope="module")
def groups() -> dict[str, list[Any]]:
    return {family: list(sharded_pieces.samples(family)) for family in sharded_pieces.FAMILIES}


def _layout(sample: Any, degree: int = 2, pinned: Any = None) -> Layout:
    (layout,) = find_layouts(sample.meta, degree, sample.roles, sample.grads, pinned)
    return layout


def _params(sample: Any, layout: Layout) -> dict[str, Placement]:
    """Placements by the last two parts of the name of the module."""
    names = dict.fromkeys(name for _, name in sample.piece.states)
    return {
        ".".join(name.split(".")[-3:]): placement
        for name, placement in zip(names, layout.params, strict=True)
    }


def _traffic(layout: Layout) -> list[tuple[str, str]]:
    return [(c.kind, c.phase) for c in layout.collectives]


ONE_EACH = [("all_reduce", "forward"), ("all_reduce", "backward")]

#: Family -> (index of the group, placements that must come out; the others are replicated).
MEGATRON: list[tuple[str, int, dict[str, Placement]]] = [
    (
        "gpt2",
        1,
        {
            "attn.c_attn.weight": Shard(1, blocks=3),
            "attn.c_attn.bias": Shard(0, blocks=3),
            "attn.c_proj.weight": Shard(0),
        },
    ),
    (
        "gpt2",
        2,
        {"mlp.c_fc.weight": Shard(1), "mlp.c_fc.bias": Shard(0), "mlp.c_proj.weight": Shard(0)},
    ),
    (
        "llama",
        1,
        {
            "self_attn.q_proj.weight": Shard(0),
            "self_attn.k_proj.weight": Shard(0),
            "self_attn.v_proj.weight": Shard(0),
            "self_attn.o_proj.weight": Shard(1),
        },
    ),
    (
        "llama",
        2,
        {
            "mlp.gate_proj.weight": Shard(0),
            "mlp.up_proj.weight": Shard(0),
            "mlp.down_proj.weight": Shard(1),
        },
    ),
    (
        "bert",
        1,
        {
            "self.query.weight": Shard(0),
            "self.query.bias": Shard(0),
            "self.key.weight": Shard(0),
            "self.key.bias": Shard(0),
            "self.value.weight": Shard(0),
            "self.value.bias": Shard(0),
            "output.dense.weight": Shard(1),
        },
    ),
    (
        "bert",
        2,
        {
            "intermediate.dense.weight": Shard(0),
            "intermediate.dense.bias": Shard(0),
            "output.dense.weight": Shard(1),
        },
    ),
    (
        "t5",
        1,
        {
            "SelfAttention.q.weight": Shard(0),
            "SelfAttention.k.weight": Shard(0),
            "SelfAttention.v.weight": Shard(0),
            "SelfAttention.relative_attention_bias.weight": Shard(1),
            "SelfAttention.o.weight": Shard(1),
        },
    ),
    ("t5", 2, {"DenseReluDense.wi.weight": Shard(0), "DenseReluDense.wo.weight": Shard(1)}),
    (
        "vit",
        1,
        {
            "attention.q_proj.weight": Shard(0),
            "attention.q_proj.bias": Shard(0),
            "attention.k_proj.weight": Shard(0),
            "attention.k_proj.bias": Shard(0),
            "attention.v_proj.weight": Shard(0),
            "attention.v_proj.bias": Shard(0),
            "attention.o_proj.weight": Shard(1),
        },
    ),
    (
        "vit",
        2,
        {"mlp.fc1.weight": Shard(0), "mlp.fc1.bias": Shard(0), "mlp.fc2.weight": Shard(1)},
    ),
]


@pytest.mark.parametrize("degree", [2, 4])
@pytest.mark.parametrize(("family", "index", "expected"), MEGATRON)
def test_megatron_comes_out_by_itself(
    groups: dict[str, list[Any]],
    family: str,
    index: int,
    expected: dict[str, Placement],
    degree: int,
) -> None:
    sample = groups[family][index]

    layout = _layout(sample, degree)

    found = _params(sample, layout)
    suffixes = tuple(expected)
    sharded = {n: p for n, p in found.items() if isinstance(p, Shard)}
    assert {s: p for s in suffixes for n, p in sharded.items() if n.endswith(s)} == expected
    assert len(sharded) == len(expected)
    # T5's bias of positions, which grows with no batch, leaves whole for later layers.
    grown = [(c.kind, c.phase) for c in layout.collectives if c.floats.per_sample]
    assert grown == ONE_EACH
    assert layout.name == "shard"
    assert layout.degree == degree


_BORDERED: dict[tuple[str, int], dict[str, Layout]] = {}


def _bordered(sample: Any, degree: int) -> dict[str, Layout]:
    """Its other layouts by name; searched once for all tests."""
    if (sample.name, degree) not in _BORDERED:
        found = find_bordered(sample.meta, degree, sample.roles, sample.grads)
        _BORDERED[sample.name, degree] = {layout.name: layout for layout in found}
    return _BORDERED[sample.name, degree]


def _large(layout: Layout) -> list[tuple[str, str, float]]:
    """Collectives that grow with the batch, of a sample."""
    grown = [c for c in layout.collectives if c.floats.per_sample]
    return sorted((c.kind, c.phase, c.floats.per_sample) for c in grown)


LAYERS = [(f, i) for f in ("gpt2", "llama", "bert", "t5", "vit") for i in (1, 2)]


@pytest.mark.parametrize("degree", [2, 4])
@pytest.mark.parametrize(("family", "index"), LAYERS)
def test_sequence_parallelism_sends_the_same_bytes_in_halves(
    groups: dict[str, list[Any]], family: str, index: int, degree: int
) -> None:
    sample = groups[family][index]
    whole = _layout(sample, degree)
    cut = _bordered(sample, degree)["sequence"]

    pairs = [(c.phase, c.floats.per_sample) for c in whole.collectives if c.floats.per_sample]
    halves = ("all_gather", "reduce_scatter")
    assert _large(cut) == sorted((kind, *pair) for pair in pairs for kind in halves)
    assert cut.params == whole.params
    assert cut.reads[0] == cut.writes[-1] == Shard(1)
    assert cut.work.saved.per_sample < whole.work.saved.per_sample
    assert cut.work.flops == whole.work.flops


def test_the_bias_of_t5_stays_cut_between_its_layers(groups: dict[str, list[Any]]) -> None:
    first, later = groups["t5"][1], groups["t5"][3]
    assert len(_layout(first).collectives) == 3
    assert len(_layout(later).collectives) == 3

    makes, reads = (_bordered(sample, 2)["shard-through"] for sample in (first, later))

    assert _traffic(makes) == _traffic(reads) == ONE_EACH
    assert makes.writes[first.piece.writes.index(later.piece.reads[-1])] == Shard(1)
    assert reads.reads == (Replicate(), Shard(1))


@pytest.mark.parametrize("family", ["gpt2", "llama", "bert", "t5", "vit"])
def test_context_layouts_keep_parameters_whole(groups: dict[str, list[Any]], family: str) -> None:
    for sample in (*groups[family][:3], groups[family][-1]):
        layout = _bordered(sample, 2)["context"]
        assert layout.axis == "cp"
        assert set(layout.params) <= {Replicate()}
    middle = _bordered(groups[family][2], 2)["context"]
    assert middle.collectives == ()
    assert middle.work.flops.per_sample == _layout(groups[family][2]).work.flops.per_sample


@pytest.mark.parametrize(("family", "degree"), [("gpt2", 2), ("llama", 4), ("bert", 2), ("vit", 4)])
def test_every_layout_computes_what_the_group_computes(
    groups: dict[str, list[Any]], family: str, degree: int
) -> None:
    names = []
    for sample in (groups[family][0], groups[family][1], groups[family][2], groups[family][-1]):
        activations = activations_of(sample.piece, sample.roles)
        borders = {"shard": WHOLE, **borders_of(sample.piece, activations, degree)}
        layouts = {"shard": _layout(sample, degree), **_bordered(sample, degree)}
        assert set(layouts) == set(borders)
        for name, border in borders.items():
            assignment = solve(sample.piece, degree, sample.grads, None, border)
            assert assignment is not None
            case = Case(name, sample.piece, assignment, sample.inputs)
            sent = tuple((c.kind, int(c.floats(2))) for c in layouts[name].collectives)
            for found in on_threads(degree, partial(deviation, case)):
                assert max(found.outputs, found.gradients, found.states) < 1e-5, sample.name
                assert found.sent == sent, sample.name
            names.append(name)
    assert names == ["shard", "sequence", "context"] * 4


@pytest.mark.parametrize("family", ["gpt2", "llama", "llama-tied", "bert", "t5", "vit"])
def test_the_loss_is_parallel_over_the_vocabulary(
    groups: dict[str, list[Any]], family: str
) -> None:
    sample = groups[family][-1]

    layout = _layout(sample)

    weight = [p for n, p in _params(sample, layout).items() if p == Shard(0) and "weight" in n]
    assert len(weight) == 1
    small = [c for c in layout.collectives if c.phase == "forward"]
    rows = sample.inputs[-1].numel()
    assert [c.floats(2) for c in small] == [rows, 2 * rows]


def test_an_untied_embedding_is_sharded_by_rows(groups: dict[str, list[Any]]) -> None:
    layout = _layout(groups["llama"][0])

    assert layout.params == (Shard(0),)
    assert _traffic(layout) == [("all_reduce", "forward")]


@pytest.mark.parametrize("placement", [Replicate(), Shard(0)])
def test_a_pinned_parameter_stays_as_it_is(
    groups: dict[str, list[Any]], placement: Placement
) -> None:
    head = groups["llama-tied"][-1]
    (name,) = head.tied & {name for _, name in head.piece.states}

    layout = _layout(head, 2, {name: placement})

    names = list(dict.fromkeys(name for _, name in head.piece.states))
    assert layout.params[names.index(name)] == placement


def test_work_is_shared(groups: dict[str, list[Any]]) -> None:
    for degree in (2, 4):
        sample = groups["llama"][2]
        whole = sum(p.numel() for p in sample.inputs[: len(sample.piece.states)])
        norm = 64
        layout = _layout(sample, degree)
        assert layout.work.params == norm + (whole - norm) // degree
        tokens, matmuls = 16, 3 * 64 * 128
        assert layout.work.flops.per_sample == 2 * tokens * matmuls / degree
        assert layout.work.backward_flops.per_sample == 4 * tokens * matmuls / degree


def test_the_layout_is_found_again_from_its_placements(groups: dict[str, list[Any]]) -> None:
    for family in ("gpt2", "t5", "resnet"):
        for sample in groups[family]:
            first = solve(sample.piece, 2, sample.grads)
            if first is not None:
                pinned = placements_of(sample.piece, first)
                assert solve(sample.piece, 2, sample.grads, pinned) == first


@pytest.mark.slow
def test_two_runs_of_python_find_the_same() -> None:
    """Ranks search for themselves: nothing may depend on the order of a set of strings."""
    text = (
        "from tests.graph import sharded_pieces as s\n"
        "from rlplace.graph.layouts import solve\n"
        "print([repr(solve(x.piece, 2, x.grads)) for x in s.samples('t5')])"
    )
    outputs = [
        subprocess.run(
            [sys.executable, "-c", text],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
            timeout=120,
        ).stdout
        for seed in ("1", "2")
    ]

    assert outputs[0] == outputs[1]
    assert "Shard" in outputs[0]


def test_legal_degrees_divide_heads_and_widths(groups: dict[str, list[Any]]) -> None:
    assert legal_degrees(groups["gpt2"][1].piece, 9) == (2, 4, 8)
    assert legal_degrees(groups["llama"][1].piece, 5) == (2, 4)
    assert 3 not in legal_degrees(groups["llama"][2].piece, 4)


def test_nothing_to_share_gives_no_layout(groups: dict[str, list[Any]]) -> None:
    sample = groups["gpt2"][1]

    assert find_layouts(sample.meta, 7, sample.roles, sample.grads) == ()
    assert solve(sample.piece, 7, sample.grads) is None


def test_a_degree_of_one_is_refused(groups: dict[str, list[Any]]) -> None:
    with pytest.raises(InputError, match="at least 2 devices"):
        solve(groups["gpt2"][1].piece, 1, frozenset())


def test_a_frozen_weight_sends_no_gradient(groups: dict[str, list[Any]]) -> None:
    """Without gradients anywhere, only the forward pass communicates."""
    sample = groups["llama"][2]

    (layout,) = find_layouts(sample.meta, 2, sample.roles, frozenset())

    assert _traffic(layout) == [("all_reduce", "forward")]
    assert layout.work.params == 0
    assert layout.work.frozen_params > 0
