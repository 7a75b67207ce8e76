"""Equal stages do not use equal memory (DeepSpeed#4477): of 8 stages the first uses most.

Under 1F1B a stage holds the activations of min(micro-batches, stages - stage) micro-batches.
"""

from __future__ import annotations

from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import rlplace
from rlplace.cluster.types import Cluster
from rlplace.graph.types import OpGraph
from rlplace.report.explain import explain


@cache
def _graph() -> OpGraph:
    """Sixteen layers; a small vocabulary, so that stages of two are about equal."""
    return rlplace.library.build(
        "gpt", layers=16, hidden=1024, heads=16, ffn=4096, vocab=512, seq_len=1024, degrees=()
    )


def _instance(stages: int, batch: int) -> rlplace.Instance:
    return rlplace.Instance(_graph(), Cluster.parse(f"{stages}xA100-40"), batch)


@settings(max_examples=20, deadline=None)
@given(st.sampled_from((2, 4, 8)), st.integers(1, 20))
def test_the_micro_batches_that_a_stage_holds(stages: int, count: int) -> None:
    instance = _instance(stages, count)
    plan = rlplace.uniform_plan(instance, pp=stages, micro_batches=count, balance="layers")
    found = rlplace.estimate(instance, plan)
    held = [stage.in_flight for stage in found.stages]
    assert held == [min(count, stages - stage) for stage in range(stages)]


def test_the_first_of_equal_stages_uses_most() -> None:
    instance = _instance(8, 32)
    plan = rlplace.uniform_plan(instance, pp=8, micro_batches=32, balance="layers")
    found = rlplace.estimate(instance, plan)
    peaks = [found.peak_memory[stage.mesh.devices[0]] for stage in plan.stages]
    assert peaks[:7] == sorted(peaks[:7], reverse=True)
    assert max(peaks) == peaks[0]
    inner = [stage.memory.activations for stage in found.stages[1:7]]
    assert inner == pytest.approx([held / 7 * inner[0] for held in range(7, 1, -1)])


def test_it_is_said() -> None:
    instance = _instance(8, 32)
    plan = rlplace.uniform_plan(instance, pp=8, micro_batches=32, balance="layers")
    told = " ".join(explain(instance, plan, rlplace.estimate(instance, plan)))
    assert "8 in stage 0, 7 in stage 1, 6 in stage 2" in told
    assert "min(micro-batches, stages - stage)" in told
    assert "device 0 is the fullest" in told
