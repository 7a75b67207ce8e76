"""Aceso's moves lead from equal stages to the optimum of small instances, by more than one hop."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from rlplace.cost.profiled import ProfiledCost, profile_graph, read_aceso
from rlplace.plan import testing
from rlplace.plan.frameworks import Framework
from rlplace.plan.types import Instance
from rlplace.planners.aceso import aceso
from rlplace.planners.costing import Costing
from rlplace.planners.exhaustive import exhaustive
from rlplace.planners.types import Budget
from rlplace.units import MIB

#: `rlplace.planners.aceso` as a module: its constants are set here.
MODULE = sys.modules[aceso.__module__]
SHARED = Path(__file__).parents[3] / "shared/data/profiles/aceso"


def _time(instance: Instance) -> float:
    found = aceso(instance, Budget(), np.random.default_rng(0))
    assert found.estimate is not None
    assert found.plan is not None
    return found.estimate.step_time


def _best(instance: Instance) -> float:
    found = exhaustive(instance, Budget(), np.random.default_rng(0))
    assert found.estimate is not None
    return found.estimate.step_time


def _pipeline(flops: list[float], devices: int = 2) -> Instance:
    """States so large, on links so slow, that replicas cannot be reduced."""
    graph = testing.chain(flops, floats=1e3, params=int(2e8))
    slow = replace(testing.INTRA, bandwidth=1e8)
    cluster = testing.cluster([[testing.round_kind(memory=20e9)] * devices], intra=slow)
    return Instance(graph, cluster, 8, "fp32", memory_margin=0.0, zero_levels=(0,))


@pytest.mark.parametrize("flops", [[3e12, 1e12, 1e12, 1e12], [1e12, 1e12, 1e12, 5e12]])
def test_groups_move_away_from_the_slowest_stage(flops: list[float]) -> None:
    instance = _pipeline(flops)
    assert _time(instance) == pytest.approx(_best(instance))


def test_a_stage_that_is_overfull_hands_groups_on_or_redoes_them() -> None:
    graph = testing.chain([1e12] * 4, floats=1e9 / 4, params=int(1e8))
    cluster = testing.cluster([[testing.round_kind(memory=9e9)] * 2])
    instance = Instance(graph, cluster, 2, "fp32", memory_margin=0.0, zero_levels=(0,))
    assert _time(instance) <= 1.01 * _best(instance)


def test_a_bottleneck_takes_devices_from_who_has_them_to_spare() -> None:
    """Activations are cheap to send and states are not: a wide stage for what has few states."""
    flops = [8e12, 1e12, 1e12]
    graph = testing.chain(flops, floats=1e3, params=int(1e6))
    graph = replace(
        graph,
        structures=tuple(
            replace(s, work=replace(s.work, params=int(1e9) if index else 0))
            for index, s in enumerate(graph.structures)
        ),
    )
    slow = replace(testing.INTRA, bandwidth=1e9)
    cluster = testing.cluster([[testing.round_kind()] * 3], intra=slow)
    instance = Instance(graph, cluster, 8, "fp32", memory_margin=0.0, zero_levels=(0,))
    found = aceso(instance, Budget(), np.random.default_rng(0))
    assert found.plan is not None
    assert [len(stage.mesh.devices) for stage in found.plan.stages] == [2, 1]
    assert _time(instance) == pytest.approx(_best(instance))


def test_several_hops_find_what_one_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """From what a single primitive cannot improve, where nothing is tried anew."""
    monkeypatch.setattr(MODULE, "_RESTARTS", 0)
    flops = list(np.random.default_rng(0).uniform(1e11, 3e12, 8))
    graph = testing.chain(flops, floats=1e7, params=int(5e7))
    slow = replace(testing.INTRA, bandwidth=1e9)
    cluster = testing.cluster([[testing.round_kind(memory=3.2e9)] * 4], intra=slow)
    instance = Instance(graph, cluster, 16, "fp32", memory_margin=0.0, zero_levels=(0,))
    several = _time(instance)
    monkeypatch.setattr(MODULE, "_HOPS", 1)
    assert several < 0.95 * _time(instance)


@pytest.mark.skipif(not SHARED.exists(), reason="needs the published profiles")
def test_a_gpt_is_planned_better_than_published() -> None:
    """GPT-1.3B on four V100-32, global batch 1024: Aceso predicts 101.18 s for its own plan."""
    profile = read_aceso(SHARED, "1_3B", 24, fine=True)
    cluster = testing.cluster(
        [[testing.round_kind("V100-32", memory=28000 * MIB)] * 4],
        intra=replace(testing.INTRA, bandwidth=42.4e9, latency=1e-5),
    )
    instance = Instance(
        profile_graph(profile),
        cluster,
        1024,
        "fp16-mixed",
        memory_margin=0.0,
        zero_levels=(0,),  # it has none
        framework=Framework("megatron", overlap_reduce=0.0),
    )
    costing = Costing(instance, ProfiledCost(profile))
    found = aceso(instance, Budget(evaluations=700), np.random.default_rng(0), costing)
    assert found.estimate is not None
    assert found.estimate.step_time <= 101.18
    assert max(found.estimate.peak_memory) <= 28000 * MIB
