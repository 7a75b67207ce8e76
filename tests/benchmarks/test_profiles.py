"""Estimates from published profiles: what is scored, and how it is summed up."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from benchmarks.profiles import (
    DATA,
    DEEPSPEED,
    Row,
    _balanced,
    _sailor_stages,
    left_out,
    plan_name,
    sailor_rows,
    summary,
)
from rlplace.bench.profiles import ACESO, v100s
from rlplace.units import MIB


def test_the_plans_that_are_left_out() -> None:
    name = "clariden/{}/{}/plan_config_{}.json"
    assert left_out(name.format("GPT-NEO", "N2", "N2_D1"))
    assert not left_out(name.format("OPT-350", "N2", "N2_D1"))
    assert left_out("mit/N3/plan_config_N3_D1.json")
    assert not left_out("mit/N6/plan_config_N6_D2.json")
    assert plan_name(name.format("OPT-350", "N1", "N1_D1_M4_G32")) == "N1_D1_M4_G32"


def test_a_summary_counts_a_peer_where_there_is_one() -> None:
    rows = [Row("a", "1", 10.0, 11.0, 8.0), Row("b", "x", 4.0, 3.0), Row("a", "2", 10.0, 7.0, 10.0)]
    assert summary(rows) == [
        ("a", "2", "20.0%", "30.0%", "-10.0%", "10.0%", "20.0%"),
        ("b", "1", "25.0%", "25.0%", "-25.0%", "-", "-"),
    ]


def test_replicas_of_a_stage_and_their_nodes() -> None:
    row = {
        "tp": "2",
        "layers": "0-7|8-25",
        "stages": "RTX-3090/tp2+2*RTX-2080/tp2 | Titan-RTX/tp2+RTX-2080/tp2+Titan-RTX/tp2",
    }
    stages, nodes = _sailor_stages(row)
    assert [(stage.start, stage.stop) for stage in stages] == [(0, 8), (8, 26)]
    assert [stage.mesh.devices for stage in stages] == [tuple(range(6)), tuple(range(6, 12))]
    assert all((stage.mesh.dp, stage.mesh.tp) == (3, 2) for stage in stages)
    assert [kind for kind, _ in nodes] == [
        *("RTX-3090", "RTX-2080", "RTX-2080"),
        *("Titan-RTX", "RTX-2080", "Titan-RTX"),
    ]


def test_borders_that_balance_loads() -> None:
    assert _balanced(np.array([3.0, 1.0, 1.0, 1.0]), 2) == [0, 1, 4]
    assert _balanced(np.ones(6), 3) == [0, 2, 4, 6]
    loads = np.random.default_rng(0).uniform(size=9)
    cuts = _balanced(loads, 3)
    best = min(
        max(loads[:a].sum(), loads[a:b].sum(), loads[b:].sum())
        for a in range(1, 8)
        for b in range(a + 1, 9)
    )
    found = [loads[a:b].sum() for a, b in pairwise(cuts)]
    assert max(found) == pytest.approx(best)


def test_clusters_of_v100s() -> None:
    for _, devices in ACESO.values():
        found = v100s(devices)
        assert len(found.devices) == devices
        assert all(node.nic is not None for node in found.nodes) == (devices > 8)


def test_the_trainer_of_sailor_blocks_beyond_a_buffer() -> None:
    assert (DEEPSPEED.sends, DEEPSPEED.buffer, DEEPSPEED.parts) == ("in turn", 4 * MIB, True)


@pytest.mark.skipif(not (DATA / "sailor").exists(), reason="published profiles are absent")
def test_plans_of_sailor_are_below_the_errors_of_its_own_simulator() -> None:
    """Strati et al. (SOSP 2025): 7.1, 8.9 and 10.0 % in time, 5.9 % in memory."""
    rows = list(sailor_rows(DATA / "sailor"))
    for group in {row.group for row in rows}:
        own = [row for row in rows if row.group == group]
        mean = np.mean([abs(row.error) for row in own])
        assert mean < np.mean([abs(row.peer_error) for row in own]), group
        assert mean < 0.059 or "time" in group, group
