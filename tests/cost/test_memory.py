"""Bytes of states and activations against the formulas of arXiv 1910.02054."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlplace.cluster.catalogue import DEVICE_KINDS
from rlplace.cost.memory import logits, saved, states, transient
from rlplace.graph.types import Affine, Layout, Work
from rlplace.plan.testing import chain, cluster, round_kind
from rlplace.plan.types import OPTIMIZERS, PRECISIONS, GroupChoice, Instance, Mesh
from rlplace.plan.uniform import uniform_plan
from rlplace.simulate.estimate import estimate
from rlplace.units import format_bytes

_INSTANCE = Instance(chain([1.0]), cluster([[round_kind()] * 8]), 8)
_WORK = Work(
    saved=Affine(0.0, 100.0),
    saved_bytes=Affine(0.0, 7.0),
    score_floats=Affine(0.0, 50.0),
    transient=Affine(0.0, 30.0),
    params=1000,
    frozen_params=200,
)
_LAYOUT = Layout("replicate", 1, _WORK)


@pytest.mark.parametrize(
    ("precision", "optimizer", "each"),
    [
        ("fp32", "adamw", 16),
        ("bf16-mixed", "adamw", 16),
        ("fp16-mixed", "adamw", 16),
        ("bf16-mixed-fp32grad", "adamw", 18),
        ("bf16", "adamw", 8),
        ("bf16-mixed", "adamw-8bit", 2 + 2 + 4 + 2),
        ("bf16-mixed", "sgd", 2 + 2 + 4),
        ("fp32", "sgd", 8),
        ("fp32", "sgd-momentum", 12),
    ],
)
def test_bytes_a_parameter(precision: str, optimizer: str, each: int) -> None:
    instance = replace(_INSTANCE, precision=precision, optimizer=optimizer)
    held = states(instance, Work(params=1000), GroupChoice(), Mesh((0,)))
    assert held.total == 1000 * each


@pytest.mark.parametrize(
    ("zero", "each"),
    # 2 bytes of weight, 2 of gradient and K = 12 of optimizer, over N = 8 (section 5 there).
    [(0, 2 + 2 + 12), (1, 2 + 2 + 12 / 8), (2, 2 + (2 + 12) / 8), (3, (2 + 2 + 12) / 8)],
)
def test_zero_levels(zero: int, each: float) -> None:
    mesh = Mesh(tuple(range(8)), dp_shard=8)
    held = states(_INSTANCE, Work(params=1000), GroupChoice(zero=zero), mesh)
    assert held.total == pytest.approx(1000 * each)
    replicated = states(_INSTANCE, Work(params=1000), GroupChoice(zero=zero), Mesh((0, 1), 2))
    assert replicated.total == 16_000, "replicas that hold everything shard nothing"


def test_frozen_parameters_have_weights_only() -> None:
    held = states(_INSTANCE, Work(frozen_params=1000), GroupChoice(), Mesh((0,)))
    assert (held.params, held.gradients, held.optimizer) == (2000, 0, 0)
    sharded = states(_INSTANCE, Work(frozen_params=1000), GroupChoice(zero=3), Mesh((0, 1), 1, 2))
    assert sharded.total == 1000


def test_activations() -> None:
    none, full = GroupChoice(), GroupChoice(recompute="full")
    flash, math = _INSTANCE, replace(_INSTANCE, attention="math")
    assert saved(flash, _LAYOUT, none, 2, 40.0) == 2 * (100 * 2 + 7)
    assert saved(math, _LAYOUT, none, 2, 40.0) == 2 * (150 * 2 + 7)
    assert saved(flash, _LAYOUT, full, 2, 40.0) == 40.0, "the inputs alone"
    assert transient(flash, _LAYOUT, full, Mesh((0,)), 2) == 2 * 30 * 2 + 2 * (100 * 2 + 7)


def test_redoing_the_core_attention() -> None:
    redo, none = GroupChoice(recompute="attention"), GroupChoice()
    flash, math = _INSTANCE, replace(_INSTANCE, attention="math")
    assert saved(math, _LAYOUT, redo, 2, 40.0) == saved(flash, _LAYOUT, none, 2, 40.0)
    assert saved(flash, _LAYOUT, redo, 2, 40.0) == saved(flash, _LAYOUT, none, 2, 40.0)
    mesh = Mesh((0,))
    more = transient(math, _LAYOUT, redo, mesh, 2) - transient(math, _LAYOUT, none, mesh, 2)
    assert more == 2 * 50 * 2, "the scores of the group that is in backward"


@pytest.mark.parametrize(("chunks", "largest"), [(1, 30.0), (2, 15.0), (8, 8.0)])
def test_a_loss_in_chunks(chunks: int, largest: float) -> None:
    """The class scores and the ops on them go by the chunk, down to the largest other op."""
    work = replace(
        _WORK,
        saved_bytes=Affine(0.0, 400.0 + 7.0),
        logits_bytes=Affine(0.0, 400.0),
        chunked_transient=Affine(0.0, 8.0),
    )
    instance = replace(_INSTANCE, loss_chunks=chunks)
    assert logits(instance, work, 2) == 800.0 / chunks
    assert (
        saved(instance, Layout("replicate", 1, work), GroupChoice(), 2, 40.0)
        == 2 * (100 * 2 + 7) + 800.0 / chunks
    )
    assert (
        transient(instance, Layout("replicate", 1, work), GroupChoice(), Mesh((0,)), 2)
        == 2 * largest * 2
    )
    plain = transient(instance, _LAYOUT, GroupChoice(), Mesh((0,)), 2)
    assert plain == 2 * 30.0 * 2, "a group without a loss does not change"


def test_zero_gathers_what_it_shards() -> None:
    mesh = Mesh((0, 1), 1, 2)
    working_set = 30.0 * 2
    for zero, extra in ((0, 0), (1, 0), (2, 1000 * 2), (3, 1000 * 2 + 1200 * 2)):
        choice = GroupChoice(zero=zero)
        assert transient(_INSTANCE, _LAYOUT, choice, mesh, 1) == working_set + extra
    assert transient(_INSTANCE, _LAYOUT, GroupChoice(zero=3), Mesh((0, 1), 2), 1) == working_set


@given(
    st.sampled_from(sorted(set(PRECISIONS) - {"fp8-mixed"})),
    st.sampled_from(sorted(OPTIMIZERS)),
    st.integers(1, 8),
)
def test_a_higher_zero_level_never_holds_more(precision: str, optimizer: str, shard: int) -> None:
    instance = replace(_INSTANCE, precision=precision, optimizer=optimizer)
    mesh = Mesh(tuple(range(shard)), 1, shard)
    held = [states(instance, _WORK, GroupChoice(zero=zero), mesh).total for zero in range(4)]
    assert held == sorted(held, reverse=True)
    weights = states(instance, _WORK, GroupChoice(), mesh)
    assert held[3] == pytest.approx(weights.total / shard)


def test_seven_billion_parameters_on_one_a100() -> None:
    """16 bytes each: 112 GB of states, and the message says by how much that is too much."""
    kind = DEVICE_KINDS["A100-80"]
    instance = Instance(chain([1e12] * 4, params=7_000_000_000 // 4), cluster([[kind]]), 1)
    found = estimate(instance, uniform_plan(instance))
    assert not found.feasible
    limit = instance.memory_limit(0)
    needs = 7e9 * 16 + kind.reserve
    assert found.peak_memory[0] == pytest.approx(needs)
    assert found.reasons == (
        f"device 0 (A100-80) needs {format_bytes(needs)}, {format_bytes(needs - limit)} "
        f"over the limit of {format_bytes(limit)}",
    )
