"""A 7B on eight H100 with 16k tokens (verl#901): "why TP4 if it fits in 1?".

No tensor parallelism: it fits without. Cutting layers or sequences holds less of a device, takes
longer, and the answer says so.
"""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest

import rlplace
from rlplace.cluster.types import Cluster
from rlplace.plan.types import Plan
from rlplace.planners.registry import PLANNERS
from rlplace.planners.types import Budget
from rlplace.report.explain import explain
from rlplace.simulate.types import Estimate


@pytest.fixture(scope="module")
def instance() -> rlplace.Instance:
    """A sample for each card."""
    graph = rlplace.library.build("llama-2-7b", seq_len=16384, degrees=(2, 4))
    return rlplace.Instance(graph, Cluster.parse("8xH100-80"), 8)


def _answer(instance: rlplace.Instance, planner: str) -> tuple[Plan, Estimate]:
    found = PLANNERS[planner](instance, Budget(), np.random.default_rng(0))
    assert found.plan is not None
    assert found.estimate is not None
    return found.plan, found.estimate


def _four(instance: rlplace.Instance) -> Estimate:
    """TP4 as it was asked about: whole layers are redone, as without it."""
    return rlplace.estimate(
        instance, rlplace.uniform_plan(instance, tp=4, zero=3, micro_batch=1, recompute="full")
    )


@pytest.mark.parametrize("planner", ["zero3", "dynamic", "osdp"])
def test_no_tensor_parallelism(instance: rlplace.Instance, planner: str) -> None:
    plan, found = _answer(instance, planner)
    (stage,) = plan.stages
    assert (stage.mesh.tp, stage.mesh.cp, stage.mesh.dp) == (1, 1, 8)
    assert _four(instance).feasible
    assert found.step_time < 0.9 * _four(instance).step_time


def test_the_answer_of_place(instance: rlplace.Instance) -> None:
    placed = rlplace.place(instance, time_limit=0.5)
    assert all(stage.mesh.tp < 4 for stage in placed.plan.stages)
    assert placed.estimate.step_time < 0.9 * _four(instance).step_time


@pytest.mark.parametrize(("margin", "least"), [(0.08, 2), (0.4, 4)])
def test_context_or_sequence_parallel_by_memory(
    instance: rlplace.Instance, margin: float, least: int
) -> None:
    """Where nothing is redone whole samples do not fit; less memory asks for a higher degree."""
    less = replace(instance, memory_margin=margin)
    for degree in (1, 2, 4):
        whole = rlplace.uniform_plan(less, cp=degree, zero=3, micro_batch=1)
        cut = rlplace.uniform_plan(
            less, tp=degree, zero=3, micro_batch=1, sequence_parallel=degree > 1
        )
        for plan in (whole, cut):
            assert rlplace.estimate(less, plan).feasible == (degree >= least), degree


def test_the_answer_says_why(instance: rlplace.Instance) -> None:
    plan, found = _answer(instance, "dynamic")
    (told,) = [line for line in explain(instance, plan, found) if "whole layers" in line]
    longer = re.findall(r"([ct]p=\d) takes [\d.]+ s \(([+-]\d+)%\) and [\d.]+ GiB", told)
    more = {name: int(share) for name, share in longer}
    assert more.keys() == {"tp=2", "tp=4", "cp=2", "cp=4"}
    assert min(more.values()) >= -2, "halves need not redo anything"
    assert more["tp=4"] >= 5


def test_of_a_plan_that_cuts_layers_nothing_is_said(instance: rlplace.Instance) -> None:
    plan = rlplace.uniform_plan(instance, tp=4, zero=3, micro_batch=1)
    told = explain(instance, plan, rlplace.estimate(instance, plan))
    assert not any("whole layers" in line for line in told)
