"""GPT-NeoX-20B on 128 cards with TP2 (gpt-neox#903): a pipeline with few micro-batches is slow.

With PP4 33 TFLOP/s a GPU, with PP1 170. So: no pipeline; the bubble has a name, and the answer
says how many micro-batches it would take for 90 %.
"""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

import rlplace
from rlplace.cluster.types import Cluster
from rlplace.plan.types import Plan
from rlplace.report.explain import bubble, explain


@pytest.fixture(scope="module")
def instance() -> rlplace.Instance:
    """Four samples of each of the 64 replicas that TP2 alone makes."""
    graph = rlplace.library.build(
        "gpt", layers=44, hidden=6144, heads=64, ffn=24576, vocab=50432, seq_len=2048,
        tie_embeddings=False, degrees=(2,),
    )  # fmt: skip
    cluster = Cluster.parse("16x8xA100-80")
    return rlplace.Instance(graph, cluster, 256, tp_degrees=(2,))


def _plan(instance: rlplace.Instance, pp: int, count: int) -> Plan:
    return rlplace.uniform_plan(
        instance, pp=pp, tp=2, zero=1, micro_batches=count, recompute="layer"
    )


def test_a_pipeline_with_few_micro_batches_is_slow(instance: rlplace.Instance) -> None:
    alone, piped = (rlplace.estimate(instance, _plan(instance, pp, 1)) for pp in (1, 4))
    assert alone.feasible
    assert piped.mfu < alone.mfu / 3, "a fifth there"
    assert piped.critical.bubble > 0.7 * piped.step_time
    assert alone.critical.bubble == pytest.approx(0.0, abs=1e-9)


def test_the_answer_has_no_pipeline(instance: rlplace.Instance) -> None:
    placed = rlplace.place(instance, time_limit=0.5)
    assert len({stage.mesh for stage in placed.plan.stages}) == 1
    few = rlplace.estimate(instance, _plan(instance, 4, 4))
    assert placed.estimate.step_time < few.step_time


def test_the_bubble_and_its_cure_are_told(instance: rlplace.Instance) -> None:
    plan = _plan(instance, 4, 4)
    found = rlplace.estimate(instance, plan)
    told = " ".join(explain(instance, plan, found))
    assert re.search(r"\d+% waiting for other stages", told)
    share = re.search(r"the bubble is (\d+)% of the pipeline's time", told)
    assert share is not None
    assert int(share[1]) == pytest.approx(100 * 3 / (4 + 3), abs=5), "3 of 7 turns"
    needed = re.search(r"(\d+) micro-batches of this size \(now 4\) make it 10%", told)
    assert needed is not None
    assert int(needed[1]) == pytest.approx(9 * 3, rel=0.15)


def test_so_many_micro_batches_do_it(instance: rlplace.Instance) -> None:
    """Of the same size, which makes the global batch larger."""
    plan = _plan(instance, 4, 4)
    needed = bubble(plan, rlplace.estimate(instance, plan)).needed()
    larger = replace(instance, global_batch=256 // 4 * needed)
    many = _plan(larger, 4, needed)
    share = bubble(many, rlplace.estimate(larger, many)).share()
    assert share == pytest.approx(0.1, abs=0.01)
