"""Every rule of a legal plan has a plan that breaks it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlplace.errors import InputError
from rlplace.plan.check import check, legal_micro_batches, nearest_shares
from rlplace.plan.degrees import nearest
from rlplace.plan.testing import cluster, random_plan, round_kind, transformer
from rlplace.plan.types import GroupChoice, Instance, Mesh, Plan, Stage
from rlplace.plan.uniform import uniform_plan

_MIXED = cluster([[round_kind("fast")] * 6, [round_kind("slow", 0.5)] * 6])
_INSTANCE = Instance(transformer(4), _MIXED, 24, precision="fp32")
#: Two stages of 5 groups on devices 0-3 and 4-7, as (dp 2, tp 2) each, with 6 micro-batches.
_PLAN = uniform_plan(_INSTANCE, pp=2, tp=2, dp_replicate=2, micro_batches=6)

Change = Callable[[Plan], Plan]


def _stage(index: int, **changes: Any) -> Change:
    def change(plan: Plan) -> Plan:
        stages = list(plan.stages)
        stages[index] = replace(stages[index], **changes)
        return replace(plan, stages=tuple(stages))

    return change


def _mesh(index: int, **changes: Any) -> Change:
    return lambda plan: _stage(index, mesh=replace(plan.stages[index].mesh, **changes))(plan)


def _choice(**changes: Any) -> Change:
    def change(plan: Plan) -> Plan:
        first, *rest = plan.stages[1].choices
        return _stage(1, choices=(replace(first, **changes), *rest))(plan)

    return change


def _field(**changes: Any) -> Change:
    return lambda plan: replace(plan, **changes)


def _one_stage(mesh: Mesh) -> Change:
    choices = (GroupChoice(),) * len(_INSTANCE.graph.groups)
    return _field(stages=(Stage(0, len(choices), mesh, choices),))


def _neighbours_on_one_mesh(plan: Plan) -> Plan:
    return _stage(1, mesh=plan.stages[0].mesh)(plan)


CASES: dict[str, tuple[Change, str, object]] = {
    "another graph": (_field(graph="x"), "plan.graph", _INSTANCE.graph.fingerprint),
    "another cluster": (_field(cluster="x"), "plan.cluster", _INSTANCE.cluster.fingerprint),
    "schedule": (_field(schedule="1f1c"), "plan.schedule", "1f1b"),
    "schedule like nothing": (_field(schedule="?"), "plan.schedule", "1f1b"),
    "lists without a schedule": (_field(orders=((),)), "plan.schedule", "explicit"),
    "a schedule without lists": (_field(schedule="explicit"), "plan.schedule", "1f1b"),
    "lanes of a schedule": (_field(schedule="zb-v"), "plan.stages.mesh", (0, 0)),
    "precision": (_field(precision="bf16"), "plan.precision", "fp32"),
    "optimizer": (_field(optimizer="sgd"), "plan.optimizer", "adamw"),
    "attention": (_field(attention="math"), "plan.attention", "flash"),
    "global batch": (_field(global_batch=12), "plan.global_batch", 24),
    "micro-batches": (_field(micro_batches=5), "plan.micro_batches", 4),
    "no micro-batch": (_field(micro_batches=0), "plan.micro_batches", 1),
    "samples of a replica": (_field(micro_batches=24), "plan.micro_batches", 12),
    "no stage": (_field(stages=()), "plan.stages", "[0, 10)"),
    "empty stage": (_stage(1, start=10), "plan.stages[1]", (10, 11)),
    "gap": (_stage(1, start=6), "plan.stages[1].start", 5),
    "late start": (_stage(0, start=1), "plan.stages[0].start", 0),
    "short": (_stage(1, stop=9), "plan.stages[1].stop", 10),
    "long": (_stage(1, stop=11), "plan.stages[1].stop", 10),
    "degree": (_mesh(0, tp=0), "plan.stages[0].mesh.tp", 1),
    "negative degrees": (_mesh(0, tp=-2, dp_shard=-1), "plan.stages[0].mesh.dp_shard", 1),
    "product": (_mesh(0, dp_replicate=4), "plan.stages[0].mesh.devices", 8),
    "twice": (_mesh(0, devices=(0, 1, 2, 1)), "plan.stages[0].mesh.devices", (0, 1, 2)),
    "no such device": (_mesh(0, devices=(0, 1, 2, 12)), "plan.stages[0].mesh.devices", 11),
    "negative device": (_mesh(0, devices=(-1, 1, 2, 3)), "plan.stages[0].mesh.devices", 0),
    "cp": (_mesh(0, dp_replicate=1, cp=2), "plan.stages[0].mesh.cp", 1),
    "mixed tp": (_mesh(1, devices=(4, 6, 5, 7)), "plan.stages[1].mesh.devices", None),
    "choices": (_stage(0, choices=(GroupChoice(),)), "plan.stages[0].choices", 5),
    "layout": (_choice(layout="shart"), "plan.stages[1].choices[0].layout", "shard"),
    "layout like nothing": (_choice(layout="?"), "plan.stages[1].choices[0].layout", "shard"),
    "zero": (_choice(zero=4), "plan.stages[1].choices[0].zero", 3),
    "recompute": (_choice(recompute="ful"), "plan.stages[1].choices[0].recompute", "full"),
    "overlap": (_mesh(1, devices=(2, 3, 4, 5)), "plan.stages.mesh.devices", None),
    "same devices, other shape": (
        lambda plan: _mesh(1, devices=(0, 1, 2, 3), dp_replicate=1, dp_shard=2)(plan),
        "plan.stages.mesh.devices",
        None,
    ),
    "neighbours": (_neighbours_on_one_mesh, "plan.stages", None),
}


@pytest.mark.parametrize("name", CASES)
def test_a_broken_rule_is_named(name: str) -> None:
    change, field, legal = CASES[name]
    with pytest.raises(InputError) as caught:
        check(_INSTANCE, change(_PLAN))
    assert caught.value.field == field
    assert caught.value.nearest == legal
    assert repr(caught.value.value) in str(caught.value)
    assert caught.value.rule in str(caught.value)


def test_legal_plans_pass() -> None:
    check(_INSTANCE, _PLAN)
    rng = np.random.default_rng(0)
    for _ in range(50):
        check(_INSTANCE, random_plan(_INSTANCE, rng))


def test_stages_that_share_a_mesh_are_legal_apart() -> None:
    meshes = (Mesh((0,)), Mesh((1,)), Mesh((0,)))
    bounds = ((0, 3), (3, 6), (6, 10))
    stages = tuple(
        Stage(a, b, mesh, (GroupChoice(),) * (b - a))
        for (a, b), mesh in zip(bounds, meshes, strict=True)
    )
    check(_INSTANCE, replace(_PLAN, stages=stages))


def test_a_tp_degree_without_layouts_names_what_there_is() -> None:
    change = _one_stage(Mesh((0, 1, 2), tp=3))
    check(_INSTANCE, change(_PLAN))
    sharded = (GroupChoice("shard"),) * len(_INSTANCE.graph.groups)
    plan = _stage(0, choices=sharded)(change(_PLAN))
    with pytest.raises(InputError, match="embedding has the layouts replicate at tp=3"):
        check(_INSTANCE, plan)


def test_legal_micro_batches() -> None:
    assert legal_micro_batches(24, 2) == (1, 2, 3, 4, 6, 12)
    assert legal_micro_batches(24, 5) == ()
    assert nearest(5, (4, 6)) == 4
    assert nearest(5, ()) is None


@pytest.mark.parametrize(
    ("changes", "field", "legal"),
    [
        ({"global_batch": 0}, "global_batch", 1),
        ({"precision": "bf61"}, "precision", "bf16, bf16-mixed"),
        ({"precision": "fp8-mixed"}, "precision", None),
        ({"optimizer": "adam"}, "optimizer", "adamw, adamw-8bit"),
        ({"attention": "flush"}, "attention", "flash"),
        ({"memory_margin": 1.0}, "memory_margin", 0.08),
        ({"memory_margin": float("nan")}, "memory_margin", 0.08),
        ({"zero_levels": ()}, "zero_levels", (0, 1, 2, 3)),
        ({"zero_levels": (0, 5)}, "zero_levels", (0, 1, 2, 3)),
        ({"recompute_modes": ()}, "recompute_modes", ("none", "attention", "ops", "full")),
        ({"recompute_modes": ("some",)}, "recompute_modes", ("none", "attention", "ops", "full")),
        ({"loss_chunks": 0}, "loss_chunks", 1),
        ({"slices": (1, 0)}, "slices", (1,)),
        ({"slices": ()}, "slices", (1,)),
    ],
)
def test_bad_instances(changes: dict[str, Any], field: str, legal: object) -> None:
    with pytest.raises(InputError) as caught:
        replace(_INSTANCE, **changes)
    assert caught.value.field == field
    if legal is not None:
        assert caught.value.nearest == legal


@pytest.mark.parametrize(
    ("shares", "rule", "near"),
    [
        ((4,), "one share for each of the 2 replicas", (2, 2)),
        ((4, 0), "a replica without samples is an idle device", (3, 1)),
        ((6, 2), "the shares are the 4 samples of a micro-batch together", (3, 1)),
    ],
)
def test_illegal_shares(shares: tuple[int, ...], rule: str, near: tuple[int, ...]) -> None:
    with pytest.raises(InputError, match=rule) as caught:
        check(_INSTANCE, _stage(0, shares=shares)(_PLAN))
    assert caught.value.nearest == near
    check(_INSTANCE, _stage(0, shares=near)(_PLAN))


def test_shares_lift_the_rule_that_replicas_divide_the_samples() -> None:
    mesh = Mesh((0, 1, 2), 3)
    plan = _one_stage(mesh)(_field(micro_batches=6)(_PLAN))
    with pytest.raises(InputError, match="3 replicas, which must divide"):
        check(_INSTANCE, plan)
    check(_INSTANCE, _stage(0, shares=(2, 1, 1))(plan))


@given(st.integers(1, 30), st.integers(1, 6), st.lists(st.integers(-1, 9), max_size=8))
def test_the_nearest_shares_are_legal(micro_batch: int, dp: int, wanted: list[int]) -> None:
    found = nearest_shares(micro_batch, dp, wanted)
    if micro_batch < dp:
        assert found is None
        return
    assert found is not None
    assert (len(found), sum(found)) == (dp, micro_batch)
    assert min(found) >= 1
    if len(wanted) == dp and sum(wanted) == micro_batch and min(wanted) >= 1:
        assert found == tuple(wanted)
