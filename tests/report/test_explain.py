"""The sentences of `rlplace plan --explain`, on instances with round figures."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlplace.plan.testing import chain, cluster, round_kind
from rlplace.plan.types import Instance, Plan
from rlplace.plan.uniform import uniform_plan
from rlplace.report.explain import Bubble, bubble, explain
from rlplace.simulate.estimate import estimate


def _instance(stages: int, batch: int) -> Instance:
    """Equal groups without tensors between them, so that nothing but the bubble costs time."""
    return Instance(
        chain([1e12] * stages), cluster([[round_kind()] * stages]), batch, precision="fp32"
    )


def _told(instance: Instance, plan: Plan) -> str:
    return "\n".join(explain(instance, plan, estimate(instance, plan)))


@given(st.integers(2, 6), st.integers(1, 24))
def test_equal_stages_lose_one_turn_less_than_there_are_stages(stages: int, count: int) -> None:
    instance = _instance(stages, count)
    plan = uniform_plan(instance, pp=stages, micro_batches=count)
    lost = bubble(plan, estimate(instance, plan))
    assert lost.turn == pytest.approx(3.0)
    assert lost.fill == pytest.approx(3.0 * (stages - 1), rel=1e-3)
    assert lost.share() == pytest.approx((stages - 1) / (count + stages - 1), rel=1e-3)
    assert lost.needed() == 9 * (stages - 1)


@given(st.floats(0.01, 10.0), st.floats(0.0, 50.0), st.integers(1, 100), st.integers(2, 8))
def test_so_many_micro_batches_are_just_enough(
    turn: float, fill: float, count: int, larger: int
) -> None:
    lost = Bubble(turn, fill, count)
    enough = lost.needed()
    assert replace(lost, micro_batches=enough).share() <= 0.1 + 1e-6
    if enough > 1:
        assert replace(lost, micro_batches=enough - 1).share() > 0.1 - 1e-6
    assert lost.share(larger) >= lost.share()


def test_a_pipeline_is_told_what_it_holds_and_loses() -> None:
    instance = _instance(4, 8)
    told = _told(instance, uniform_plan(instance, pp=4, micro_batches=8))
    assert "of a step of 33.0 s: 73% forward and backward" in told
    assert "27% waiting for other stages" in told
    law = "4 in stage 0, 3 in stage 1, 2 in stage 2, 1 in stage 3"
    assert f"1f1b keeps the activations of several micro-batches: {law}" in told
    assert "= min(micro-batches, stages - stage)" in told
    assert "as long as 3.0 micro-batches of the busiest stage" in told
    assert "27 micro-batches of this size (now 8) make it 10%" in told
    assert "at a global batch of 8, larger micro-batches are fewer" in told
    assert "twice as large, it is 43%" in told, "3 / (3 + 4)"


def test_other_schedules_hold_other_numbers() -> None:
    instance = _instance(4, 8)
    plan = uniform_plan(instance, pp=4, micro_batches=8, schedule="gpipe")
    told = _told(instance, plan)
    assert "gpipe keeps the activations of several micro-batches: 8 in stages 0-3\n" in told


def test_one_stage_has_no_bubble_to_explain() -> None:
    instance = _instance(2, 8)
    told = explain(instance, plan := uniform_plan(instance), estimate(instance, plan))
    assert not any("bubble" in line or "micro-batches" in line for line in told)
    assert told[0] == "of a step of 24.0 s: 100% forward and backward with the collectives in them"


def test_the_fullest_device_is_told_with_what_fills_it() -> None:
    graph = chain([1e12] * 2, floats=1e6, params=10**6)
    kinds = [round_kind("small", memory=1e9), round_kind("large", memory=1e11)]
    instance = Instance(graph, cluster([kinds]), 2, precision="fp32", memory_margin=0.0)
    plan = uniform_plan(instance, pp=2, micro_batches=1)
    found = estimate(instance, plan)
    told = explain(instance, plan, found)[-1]
    assert told.startswith("device 0 is the fullest, with 30.5 MiB of 954 MiB in the ")
    assert "50% activations" in told
    assert f"in the {found.peak_phase[0]}: " in told
