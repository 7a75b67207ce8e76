"""Bytes of states and activations against the formulas of arXiv 1910.02054."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlplace.cluster.catalogue import DEVICE_KINDS
from rlplace.cluster.types import Cluster
from rlplace.cost.memory import logits, redone, saved, states, step_transient, transient
from rlplace.graph import library
from rlplace.graph.types import Affine, Layout, Product, Replicate, Shard, Work
from rlplace.plan.frameworks import Framework
from rlplace.plan.testing import chain, cluster, round_kind
from rlplace.plan.types import OPTIMIZERS, PRECISIONS, GroupChoice, Instance, Mesh
from rlplace.plan.uniform import uniform_plan
from rlplace.simulate.estimate import estimate
from rlplace.units import GIB, format_bytes

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
    assert redone(flash, _LAYOUT, full, 2) == saved(flash, _LAYOUT, none, 2, 40.0)
    assert redone(flash, _LAYOUT, none, 2) == 0.0


def test_redoing_the_core_attention() -> None:
    redo, none = GroupChoice(recompute="attention"), GroupChoice()
    flash, math = _INSTANCE, replace(_INSTANCE, attention="math")
    assert saved(math, _LAYOUT, redo, 2, 40.0) == saved(flash, _LAYOUT, none, 2, 40.0)
    assert saved(flash, _LAYOUT, redo, 2, 40.0) == saved(flash, _LAYOUT, none, 2, 40.0)
    mesh = Mesh((0,))
    more = transient(math, _LAYOUT, redo, mesh, 2) - transient(math, _LAYOUT, none, mesh, 2)
    assert more == 2 * 50 * 2, "the scores of the group that is in backward"


#: 100 class scores a sample, and an op of 80 floats beside the loss.
_SCORED = replace(
    _WORK,
    saved_bytes=Affine(0.0, 400.0 + 7.0),
    logits_bytes=Affine(0.0, 400.0),
    transient=Affine(0.0, 300.0),
    chunked_transient=Affine(0.0, 80.0),
)


@pytest.mark.parametrize(
    ("chunks", "largest"),
    # Two gradients of the scores of a chunk, in fp32; or the other op, when the log-probabilities
    # of the last chunk are gone.
    [(1, 2 * 800.0), (2, 2 * 400.0), (8, 2 * 80 * 2 - 100.0)],
)
def test_a_loss_in_chunks(chunks: int, largest: float) -> None:
    """The class scores and the ops on them go by the chunk, down to the largest other op."""
    work = _SCORED
    instance = replace(_INSTANCE, loss_chunks=chunks)
    assert logits(instance, work, 2) == 800.0 / chunks
    assert (
        saved(instance, Layout("replicate", 1, work), GroupChoice(), 2, 40.0)
        == 2 * (100 * 2 + 7) + 800.0 / chunks
    )
    assert (
        transient(instance, Layout("replicate", 1, work), GroupChoice(), Mesh((0,)), 2) == largest
    )
    plain = transient(instance, _LAYOUT, GroupChoice(), Mesh((0,)), 2)
    assert plain == 2 * 30.0 * 2, "a group without a loss does not change"


@pytest.mark.parametrize(
    ("width", "copies", "kept", "passing"),
    [(4, 2.0, 800, 1600), (4, 3.0, 800, 2400), (2, 2.0, 400, 800), (4, 0.0, 800, 0)],
)
def test_class_scores_as_the_framework_keeps_them(
    width: int, copies: float, kept: float, passing: float
) -> None:
    own = Framework("own", score_bytes=width, score_copies=copies)
    instance = replace(_INSTANCE, framework=own)
    layout = Layout("replicate", 1, _SCORED)
    assert logits(instance, _SCORED, 2) == kept
    assert saved(instance, layout, GroupChoice(), 2, 0.0) == 2 * (100 * 2 + 7) + kept
    assert transient(instance, layout, GroupChoice(), Mesh((0,)), 2) == passing
    wide = replace(instance, precision="fp32")
    assert logits(wide, _SCORED, 2) == 800, "never narrower than the activations"


def test_the_gradient_of_a_head_comes_after_the_loss() -> None:
    """What the loss makes is gone when the whole gradient of the weights is there."""
    layout, mesh = Layout("replicate", 1, replace(_SCORED, params=1000)), Mesh((0, 1), 1, 2)
    small, large = (
        transient(_INSTANCE, replace(layout, work=replace(layout.work, params=params)), c, mesh, 2)
        for params, c in ((100, GroupChoice(zero=2)), (2000, GroupChoice(zero=2)))
    )
    assert small == 2 * 800
    assert large == 2000 * 2 + max(2 * 80 * 2, 200 * 2) - 800


def test_gradients_that_wait_beside_their_sums() -> None:
    own = Framework("own", both_gradients=True)
    summed = replace(_INSTANCE, framework=own, precision="bf16-mixed-fp32grad")
    assert states(summed, Work(params=1000), GroupChoice(), Mesh((0,))).total == 20_000
    plain = replace(_INSTANCE, framework=own)
    assert states(plain, Work(params=1000), GroupChoice(), Mesh((0,))).total == 16_000


def test_what_the_optimizer_step_makes_is_of_its_own_part() -> None:
    instance = replace(_INSTANCE, framework=Framework("own", step_bytes=4.0))
    mesh = Mesh(tuple(range(8)), dp_shard=8)
    found = [
        step_transient(instance, Work(params=1000), choice, mesh)
        for choice in (GroupChoice(), GroupChoice(zero=1), GroupChoice(zero=1, offload=True))
    ]
    assert found == [4000, 500, 0]
    assert step_transient(_INSTANCE, Work(params=1000), GroupChoice(), mesh) == 0
    summed = replace(instance, precision="bf16-mixed-fp32grad")
    assert step_transient(summed, Work(params=1000), GroupChoice(), mesh) == 0


def test_gradients_that_are_copied_to_be_reduced_make_a_buffer() -> None:
    own = Framework("own", flattens=True)
    mesh = Mesh(tuple(range(8)), dp_shard=8)
    for precision, wide in (("fp32", 4), ("bf16-mixed", 2)):
        instance = replace(_INSTANCE, framework=own, precision=precision)
        found = [
            step_transient(instance, Work(params=1000), choice, mesh)
            for choice in (GroupChoice(), GroupChoice(offload=True), GroupChoice(zero=1))
        ]
        assert found == [1000 * wide, 1000 * wide, 0]


def test_inputs_that_are_cut_are_kept_in_parts() -> None:
    cut = Layout("sequence", 2, _WORK, reads=(Shard(1), Replicate()))
    assert saved(_INSTANCE, cut, GroupChoice(recompute="full"), 2, 40.0) == 20.0
    whole = Layout("shard", 2, _WORK, reads=(Replicate(),))
    assert saved(_INSTANCE, whole, GroupChoice(recompute="full"), 2, 40.0) == 40.0


def test_matmuls_that_the_mode_ops_redoes_are_not_kept() -> None:
    """What attention gives, as large as its queries, always is."""
    heads, queries, width = (Affine(0.0, 4.0), Affine(3.0), Affine(2.0))
    kernel = Product(
        "attention", "forward", 1, heads, queries, queries, width, flops=Affine(), moved=Affine()
    )
    work = replace(_WORK, kept_by_ops=Affine(0.0, 64.0), products=(kernel,))
    layout, choice = Layout("replicate", 1, work), GroupChoice(recompute="ops")
    assert saved(_INSTANCE, layout, choice, 2, 40.0) == 40 + 2 * 64 * 2
    half = replace(_INSTANCE, framework=Framework("own", redone_matmuls=0.5))
    assert saved(half, layout, choice, 2, 40.0) == 40 + 2 * (24 + 20) * 2


def test_zero_gathers_what_it_shards() -> None:
    mesh = Mesh((0, 1), 1, 2)
    working_set = 30.0 * 2
    for zero, extra in ((0, 0), (1, 0), (2, 1000 * 2), (3, 1000 * 2 + 1200 * 2)):
        choice = GroupChoice(zero=zero)
        assert transient(_INSTANCE, _LAYOUT, choice, mesh, 1) == working_set + extra
    assert transient(_INSTANCE, _LAYOUT, GroupChoice(zero=3), Mesh((0, 1), 2), 1) == working_set


@given(
    st.sampled_from(sorted(name for name, each in PRECISIONS.items() if each.compute != "fp8")),
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


#: The 22B model of Korthikanti et al. (arXiv 2205.05198, table 3), tp 8, micro-batches of 4.
_SEQUENCE, _SAMPLES, _HIDDEN, _HEADS, _TP = 2048, 4, 6144, 64, 8
_SBH = _SEQUENCE * _SAMPLES * _HIDDEN
_SCORES = 5 * _HEADS * _SEQUENCE / _HIDDEN / _TP

#: Recompute, sequence parallel -> bytes of a layer over sbh (their equations 1 to 6 and table 2).
_FORMULA: dict[tuple[str, bool], float] = {
    ("none", False): 10 + 24 / _TP + _SCORES,
    ("none", True): 34 / _TP + _SCORES,
    ("attention", False): 10 + 24 / _TP,
    ("attention", True): 34 / _TP,
    ("layer", False): 2.0,
}


def test_the_formula_gives_the_published_figures() -> None:
    """Figure 1: 59.25 and 9.56 GiB of the 48 layers; figure 7: shares of the former in percent."""
    whole = 48 * _SBH * _FORMULA["none", False]
    assert whole / GIB == pytest.approx(59.25)
    assert 48 * _SBH * _FORMULA["attention", True] / GIB == pytest.approx(9.5625)
    shares = [100 * 48 * _SBH * factor / whole for factor in _FORMULA.values()]
    assert shares == pytest.approx([100, 66.84, 49.42, 16.18, 7.64], abs=0.1)


@pytest.fixture(scope="module")
def megatron() -> Instance:
    """Four layers of the 22B model on Megatron's two nodes."""
    sizes: dict[str, Any] = {
        "layers": 4,
        "hidden": _HIDDEN,
        "heads": _HEADS,
        "ffn": 4 * _HIDDEN,
        "vocab": 51200,
        "seq_len": _SEQUENCE,
        "dropout": 0.1,
    }
    return Instance(
        library.build("gpt", degrees=(_TP,), **sizes),
        Cluster.parse("2x8xA100-80"),
        global_batch=16,
        precision="fp16-mixed",
        attention="math",
        framework="megatron",
    )


@pytest.mark.parametrize(("schedule", "layers", "held"), [("1f1b", 4, 2), ("interleaved", 5, 4)])
@pytest.mark.parametrize(("recompute", "sequence"), _FORMULA)
def test_the_estimate_is_the_formula(
    megatron: Instance, recompute: Any, sequence: bool, schedule: str, layers: int, held: int
) -> None:
    """The first of two stages holds as much as all layers do, times 1 + (p - 1) / (p m).

    That is 1 without interleaving, 5/4 with m = 2 stages a rank; and the mask of the dropout behind
    the embedding for each micro-batch in flight (their sections 4.2.3 and 4.3). Beyond the formula
    there are statistics of norms and softmax.
    """
    plan = uniform_plan(
        megatron,
        pp=2,
        tp=_TP,
        micro_batch=_SAMPLES,
        recompute=recompute,
        sequence_parallel=sequence,
        schedule=schedule,
        balance="layers",
    )
    formula = layers * _SBH * _FORMULA[recompute, sequence]
    formula += held * _SBH / (_TP if sequence else 1)
    found = estimate(megatron, plan).memory[0]
    assert found.activations == pytest.approx(formula, rel=0.0012)
