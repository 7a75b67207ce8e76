"""At a fixed global batch a larger micro-batch means a larger bubble (verl_megatron_practice#9)."""

from __future__ import annotations

from functools import cache
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import rlplace
from rlplace.cluster.types import Cluster
from rlplace.graph.types import OpGraph
from rlplace.report.explain import bubble, explain


@cache
def _graph() -> OpGraph:
    return rlplace.library.build(
        "gpt", layers=16, hidden=1024, heads=16, ffn=4096, vocab=512, seq_len=1024, degrees=()
    )


@settings(max_examples=15, deadline=None)
@given(
    st.sampled_from((2, 4, 8)),
    st.sampled_from((16, 24, 64)),
    st.sampled_from(("1f1b", "gpipe", "zb-h1")),
)
def test_the_law(stages: int, batch: int, schedule: str) -> None:
    instance = rlplace.Instance(_graph(), Cluster.parse(f"{stages}xA100-80"), batch)
    shares = []
    for samples in (size for size in (1, 2, 4, 8) if batch % size == 0):
        plan = rlplace.uniform_plan(
            instance, pp=stages, micro_batch=samples, schedule=schedule, balance="layers"
        )
        assert plan.micro_batches * samples == batch
        found = rlplace.estimate(instance, plan)
        shares.append(found.critical.bubble / (found.critical.compute + found.critical.bubble))
    assert all(small < large for small, large in pairwise(shares))


def test_it_is_stated() -> None:
    instance = rlplace.Instance(_graph(), Cluster.parse("8xA100-80"), 64)
    plans = [
        rlplace.uniform_plan(instance, pp=8, micro_batch=samples, balance="layers")
        for samples in (2, 4)
    ]
    lost = [bubble(plan, rlplace.estimate(instance, plan)).share() for plan in plans]
    told = " ".join(explain(instance, plans[0], rlplace.estimate(instance, plans[0])))
    assert "at a global batch of 64, larger micro-batches are fewer and the bubble grows" in told
    said = int(told.split("twice as large, it is ")[1].split("%")[0])
    assert said == pytest.approx(100 * lost[1], abs=3), "and it is what the estimate says"
