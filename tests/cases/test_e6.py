"""Full logits are a line of their own in the memory of the last stage (Automodel#3907).

8192 tokens x 151,936 classes in fp32 are 4.64 GiB; tensor parallelism divides them, a loss in
chunks bounds them.
"""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from rich.console import Console

import rlplace
from rlplace.graph.types import OpGraph
from rlplace.plan.types import Plan
from rlplace.planners.remedies import smallest_changes
from rlplace.report.plan_view import plan_data, render_plan
from rlplace.simulate.bound import bound

_GIB = 2**30
_LOGITS = 8192 * 151_936 * 4


@pytest.fixture(scope="module")
def graph() -> OpGraph:
    """Four layers of Qwen2-1.5B."""
    return rlplace.library.build("qwen2-1.5b", layers=4, seq_len=8192, degrees=(2,))


@pytest.fixture(scope="module")
def instance(graph: OpGraph) -> rlplace.Instance:
    return rlplace.Instance(graph, rlplace.Cluster.parse("4xA100-80"), 4)


def _plan(instance: rlplace.Instance, tp: int = 1) -> Plan:
    """Two stages; micro-batches of one sample, 8192 tokens."""
    return rlplace.uniform_plan(instance, pp=2, tp=tp, dp_replicate=1, micro_batches=4)


def test_the_line_of_the_last_stage(instance: rlplace.Instance) -> None:
    assert round(_LOGITS / _GIB, 2) == 4.64
    plan = _plan(instance)
    found = rlplace.estimate(instance, plan)
    first, last = (found.memory[stage.mesh.devices[0]] for stage in plan.stages)
    assert last.logits == pytest.approx(_LOGITS)
    assert first.logits == 0.0
    assert found.stages[1].memory.logits == last.logits
    works = [instance.graph.structure(index).work for index in range(len(instance.graph.groups))]
    own = works[plan.stages[1].start :]
    kept = sum(work.saved(1.0) * 2 + work.saved_bytes(1.0) for work in own)
    assert last.activations + last.logits == pytest.approx(kept), "and it is not counted twice"


def test_tensor_parallelism_divides_it(instance: rlplace.Instance) -> None:
    plan = _plan(instance, tp=2)
    found = rlplace.estimate(instance, plan)
    assert found.memory[plan.stages[1].mesh.devices[0]].logits == pytest.approx(_LOGITS / 2)


@pytest.mark.parametrize("chunks", [2, 8])
def test_a_chunked_loss_bounds_it(instance: rlplace.Instance, chunks: int) -> None:
    chunked = replace(instance, loss_chunks=chunks)
    whole, part = (rlplace.estimate(i, _plan(i)) for i in (instance, chunked))
    last = _plan(instance).stages[1].mesh.devices[0]
    assert part.memory[last].logits == pytest.approx(_LOGITS / chunks)
    assert part.memory[last].activations == whole.memory[last].activations
    assert part.memory[last].transient < whole.memory[last].transient
    assert part.peak_memory[0] == whole.peak_memory[0], "the first stage has none"
    assert part.step_time == whole.step_time


def test_it_is_held_at_the_peak_of_a_head_that_is_redone_too(instance: rlplace.Instance) -> None:
    plan = rlplace.uniform_plan(instance, pp=2, dp_replicate=1, micro_batches=4, recompute="full")
    found = rlplace.estimate(instance, plan)
    last = found.memory[plan.stages[1].mesh.devices[0]]
    assert last.logits == pytest.approx(_LOGITS)
    assert last.total == found.peak_memory[plan.stages[1].mesh.devices[0]]


def test_it_is_a_line_of_the_report_and_of_the_json(instance: rlplace.Instance) -> None:
    plan = _plan(instance)
    found, limit = rlplace.estimate(instance, plan), bound(instance)
    data = plan_data(
        instance, plan, found, bound=limit, planner="", plan_seconds=0.0, alternatives={}
    )
    rows = json.loads(json.dumps(data))["stages"]
    assert [row["memory_parts"]["logits"] for row in rows] == pytest.approx([0.0, _LOGITS])
    assert sum(rows[1]["memory_parts"].values()) == pytest.approx(rows[1]["memory"])
    console = Console(width=80, record=True, file=open("/dev/null", "w"))
    console.print(render_plan(instance, plan, found, limit))
    lines = console.export_text().splitlines()
    head = next(line for line in lines if line.startswith("GiB of"))
    at = head.split()[2:].index("logits")
    row = next(line for line in lines if line.startswith("stage 1"))
    assert row.split()[2:][at] == "4.64"


def test_chunks_are_a_remedy_where_they_help(instance: rlplace.Instance) -> None:
    """One device that holds all but the full logits."""
    one = replace(
        instance,
        cluster=rlplace.Cluster.parse("1xA100-80"),
        global_batch=1,
        recompute_modes=("none",),
        memory_margin=0.0,
    )
    need = [
        rlplace.estimate(i, rlplace.uniform_plan(i)).peak_memory[0]
        for i in (one, replace(one, loss_chunks=8))
    ]
    kind = replace(one.cluster.kinds[0], memory=int(sum(need) / 2))
    tight = replace(one, cluster=replace(one.cluster, kinds=(kind,)))
    assert any("loss_chunks=8" in change for change in smallest_changes(tight, seconds=20.0))
    chunked = replace(tight, loss_chunks=8)
    assert not any("loss_chunks" in change for change in smallest_changes(chunked, seconds=20.0))


@pytest.mark.parametrize(("model", "scores"), [("gpt2-tiny", 32 * 256), ("vit-tiny", 10)])
def test_any_loss_over_classes_has_it(model: str, scores: int) -> None:
    found = rlplace.library.build(model, degrees=(2,))
    works = [structure.work for structure in found.structures]
    assert sum(work.logits_bytes(1.0) for work in works) == 4 * scores
    assert sum(work.logits_bytes(1.0) > 0 for work in works) == 1
