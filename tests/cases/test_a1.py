"""LLaMA-7B, full fine-tune, on one A100-80 (stanford_alpaca#56): no, and what would do.

The states alone are 16 bytes a parameter, 108 GB.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

import rlplace
from rlplace.cluster.types import Cluster
from rlplace.errors import InfeasibleError


@pytest.fixture(scope="module")
def instance() -> rlplace.Instance:
    """Alpaca's samples have at most 512 tokens."""
    graph = rlplace.library.build("llama-2-7b", seq_len=512, degrees=())
    return rlplace.Instance(graph, Cluster.parse("1xA100-80"), 8)


def test_the_states_alone_are_more_than_the_card(instance: rlplace.Instance) -> None:
    plan = rlplace.uniform_plan(instance, micro_batch=1, recompute="full")
    found = rlplace.estimate(instance, plan)
    use = found.memory[0]
    states = use.params + use.gradients + use.optimizer
    assert states == 16 * instance.graph.params
    assert states == pytest.approx(108e9, rel=0.01)
    assert not found.feasible
    assert "device 0 (A100-80) needs" in found.reasons[0]


def test_the_answer_names_the_smallest_count_and_the_host(instance: rlplace.Instance) -> None:
    with pytest.raises(InfeasibleError) as caught:
        rlplace.place(instance, time_limit=0.1)
    told = str(caught.value)
    assert "no plan for llama-2-7b on 1xA100-80 fits" in told
    assert "2 times the devices (2 instead of 1) with ZeRO-3" in told
    assert "the optimizer states in the memory of the host (offload=True)" in told


def test_what_it_names_fits(instance: rlplace.Instance) -> None:
    two = replace(instance, cluster=Cluster.parse("2xA100-80"))
    plan = rlplace.uniform_plan(two, micro_batch=1, zero=3, recompute="full")
    found = rlplace.estimate(two, plan)
    assert found.feasible
    use = found.memory[0]
    assert use.params + use.gradients + use.optimizer == pytest.approx(54e9, rel=0.01)
    copies = rlplace.uniform_plan(two, micro_batch=1, recompute="full")
    assert not rlplace.estimate(two, copies).feasible, "two copies are no smaller than one"
    plan = rlplace.uniform_plan(instance, micro_batch=1, offload=True)
    assert rlplace.estimate(instance, plan).feasible


def test_the_host_costs_time(instance: rlplace.Instance) -> None:
    """Gradients go there, 13.5 GB, and weights come back, over PCIe."""
    placed = rlplace.place(replace(instance, offload=True), time_limit=0.1)
    assert any(choice.offload for stage in placed.plan.stages for choice in stage.choices)
    all_there = rlplace.uniform_plan(instance, micro_batch=1, offload=True)
    critical = rlplace.estimate(instance, all_there).critical
    assert critical.optimizer > 2 * 2 * instance.graph.params / 31.5e9, "twice the wire's time"
