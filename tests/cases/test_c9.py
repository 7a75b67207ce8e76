"""The link type decides it (InternLM#22): 7B on 8 cards of a node, ZeRO-1.

NVLink 188 TFLOP/s a GPU (4,234 tokens/s), PCIe 93 (2,105); micro-batches of 2 x 2048 tokens, four a
step. On PCIe fewer gathers are proposed.
"""

from __future__ import annotations

from functools import cache

import pytest

import rlplace
from rlplace.cluster.types import Cluster
from rlplace.report.explain import explain
from rlplace.simulate.types import Estimate


@cache
def _instance(link: str) -> rlplace.Instance:
    graph = rlplace.library.build(
        "llama", layers=32, hidden=4096, heads=32, kv_heads=32, ffn=11008, vocab=103168,
        seq_len=2048, degrees=(),
    )  # fmt: skip
    return rlplace.Instance(graph, Cluster.parse(f"8xA100-80:{link}"), 64)


def _estimate(link: str, zero: int) -> Estimate:
    instance = _instance(link)
    return rlplace.estimate(instance, rlplace.uniform_plan(instance, zero=zero, micro_batch=2))


def test_nvlink_as_measured() -> None:
    found = _estimate("nvlink", 1)
    assert found.feasible
    assert found.tokens_per_s / 8 == pytest.approx(4233.7, rel=0.25)


def test_pcie_is_slower_the_more_is_gathered() -> None:
    times = {
        link: [_estimate(link, zero).step_time for zero in (1, 2, 3)] for link in ("nvlink", "pcie")
    }
    lost = [pcie / nvlink for pcie, nvlink in zip(times["pcie"], times["nvlink"], strict=True)]
    assert lost == sorted(lost)
    assert lost[0] > 1.1
    assert lost[2] > 1.5


def test_what_limits_is_told_and_fewer_gathers_are_proposed() -> None:
    instance = _instance("pcie")
    plan = rlplace.uniform_plan(instance, zero=3, micro_batch=2)
    told = explain(instance, plan, rlplace.estimate(instance, plan))
    assert any(line.startswith("the slow link is pcie (") for line in told)
    assert any("ZeRO-1 in place of ZeRO-3 takes" in line for line in told)
    nvlink = _instance("nvlink")
    plan = rlplace.uniform_plan(nvlink, zero=3, micro_batch=2)
    told = explain(nvlink, plan, rlplace.estimate(nvlink, plan))
    assert not any("the slow link" in line for line in told)


def test_the_answer_on_pcie_gathers_less() -> None:
    placed = {link: rlplace.place(_instance(link), time_limit=0.3) for link in ("nvlink", "pcie")}
    assert placed["pcie"].estimate.step_time < _estimate("pcie", 3).step_time
    levels = {c.zero for stage in placed["pcie"].plan.stages for c in stage.choices}
    assert 3 not in levels
