from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlplace.errors import InputError, RankFailedError
from rlplace.graph.layouts import activations_of, borders_of, find_bordered, find_layouts, solve
from rlplace.graph.sharding.borders import WHOLE
from rlplace.graph.sharding.lower import Assignment
from rlplace.graph.sharding.rules import Strategy
from rlplace.graph.types import Partial, Replicate, Shard
from rlplace.runtime.shard import shard_parameter, unshard
from rlplace.runtime.shard_check import Case, check_ranks


def _load(name: str) -> Any:
    path = Path(__file__).parents[1] / "graph" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@settings(deadline=None, max_examples=50)
@given(
    shape=st.lists(st.integers(1, 3), min_size=1, max_size=3),
    dim=st.integers(0, 2),
    size=st.integers(1, 4),
    blocks=st.integers(1, 3),
)
def test_shards_join_to_the_whole(shape: list[int], dim: int, size: int, blocks: int) -> None:
    dim %= len(shape)
    shape[dim] *= size * blocks
    full = torch.randn(shape)
    placement = Shard(dim, blocks)

    shards = [shard_parameter(full, placement, rank, size) for rank in range(size)]

    assert all(shard.is_contiguous() for shard in shards)
    assert all(shard.numel() * size == full.numel() for shard in shards)
    assert torch.equal(unshard(shards, placement), full)


def test_blocks_are_cut_one_by_one() -> None:
    fused = torch.arange(12)

    assert shard_parameter(fused, Shard(0, blocks=3), 0, 2).tolist() == [0, 1, 4, 5, 8, 9]
    assert shard_parameter(fused, Shard(0, blocks=3), 1, 2).tolist() == [2, 3, 6, 7, 10, 11]


def test_a_replicated_parameter_is_a_copy() -> None:
    full = torch.nn.Parameter(torch.randn(3, 2))

    part = shard_parameter(full, Replicate(), 1, 2)

    assert torch.equal(part, full)
    assert part.data_ptr() != full.data_ptr()
    assert torch.equal(unshard([part, part], Replicate()), full)


def test_an_uneven_cut_and_a_partial_state_are_refused() -> None:
    with pytest.raises(InputError, match="length 6 must divide into 2 blocks"):
        shard_parameter(torch.zeros(6), Shard(0, blocks=2), 0, 2)
    with pytest.raises(InputError, match="replicated or sharded"):
        shard_parameter(torch.zeros(6), Partial(), 0, 2)
    with pytest.raises(InputError, match="replicated or sharded"):
        unshard([torch.zeros(6)], Partial())


@pytest.fixture(scope="module")
def pieces() -> list[Any]:
    module = _load("sharded_pieces")
    return [sample for family in module.FAMILIES for sample in module.samples(family)]


def _one_of_each_kind(pieces: list[Any]) -> Iterator[tuple[Any, int]]:
    """Embedding, attention, MLP, later layers of ResNet and T5, and head; with 2 and 4 devices."""
    for family in ("gpt2", "llama", "bert", "t5", "vit", "resnet"):
        own = [sample for sample in pieces if sample.name.startswith(f"{family}:")]
        for sample in {each.name: each for each in (*own[:4], own[-1])}.values():
            yield sample, 2
            yield sample, 4


@pytest.mark.dist
@pytest.mark.slow
def test_lowered_groups_equal_the_whole_on_ranks(pieces: list[Any]) -> None:
    cases, expected = [], {}
    for sample, degree in _one_of_each_kind(pieces):
        activations = activations_of(sample.piece, sample.roles)
        borders = {"shard": WHOLE, **borders_of(sample.piece, activations, degree)}
        given = (sample.meta, degree, sample.roles, sample.grads)
        layouts = {lay.name: lay for lay in (*find_layouts(*given), *find_bordered(*given))}
        for kind in sorted(borders.keys() & layouts.keys()):
            name = f"{sample.name} {kind} on {degree}"
            assignment = solve(sample.piece, degree, sample.grads, None, borders[kind])
            assert assignment is not None
            cases.append(Case(name, sample.piece, assignment, sample.inputs))
            sent = [(c.kind, int(c.floats(2))) for c in layouts[kind].collectives]
            expected[name] = sent

    found = check_ranks(cases, ranks=4, timeout=300)

    assert len(found) == len(cases) >= 100
    for name, deviations in found.items():
        for deviation in deviations:
            assert deviation.outputs < 1e-5, name
            assert deviation.gradients < 1e-5, name
            assert deviation.states < 1e-5, name
            assert list(deviation.sent) == expected[name], name


@pytest.mark.dist
def test_tied_weights_pinned_to_either_placement(pieces: list[Any]) -> None:
    cases = []
    for sample in pieces:
        if sample.name.startswith("llama-tied") and sample.tied & {
            n for _, n in sample.piece.states
        }:
            for placement in (Replicate(), Shard(0)):
                pinned = dict.fromkeys(sample.tied, placement)
                assignment = solve(sample.piece, 2, sample.grads, pinned)
                if assignment is not None:
                    name = f"{sample.name} {placement}"
                    cases.append(Case(name, sample.piece, assignment, sample.inputs))

    found = check_ranks(cases, ranks=2)

    assert len(found) == 3  # the embedding alone has nothing to share when it is replicated
    for name, deviations in found.items():
        assert max(max(d.outputs, d.gradients) for d in deviations) < 1e-5, name


@pytest.mark.dist
def test_a_wrong_program_fails_on_the_rank_and_ends_all(pieces: list[Any]) -> None:
    sample = pieces[0]
    wrong = Strategy((Shard(0), Replicate()), Shard(0))
    first = next(n for n in sample.piece.module.graph.nodes if n.op == "call_function")
    assignment = Assignment(2, {first.name: wrong})

    with pytest.raises(RankFailedError):
        check_ranks([Case("wrong", sample.piece, assignment, sample.inputs)], ranks=2)
