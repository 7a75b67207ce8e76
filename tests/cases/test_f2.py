"""Unequal batches on unequal cards (pytorch-image-models#580): 2 x A6000 and 2 x 2080Ti.

EfficientNet-B0, data parallel: 200 samples on each 2,000 img/s, 300 and 200 2,500. The network is
another one here; what counts is that the faster cards no longer wait.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest

import rlplace
from rlplace.cluster.types import Cluster
from rlplace.graph.types import OpGraph
from rlplace.planners.poplar import poplar
from rlplace.planners.types import Budget
from rlplace.simulate.types import Estimate


@cache
def _graph() -> OpGraph:
    return rlplace.library.build(
        "resnet", depths="2,2,2,2", widths="64,128,256,512", image=128, degrees=()
    )


def _estimate(batch: int, shares: tuple[int, ...]) -> Estimate:
    cluster = Cluster.parse("1x(2xA6000-48+2x2080Ti-11)")
    instance = rlplace.Instance(_graph(), cluster, batch, precision="fp16-mixed")
    plan = rlplace.uniform_plan(instance, micro_batches=1)
    (stage,) = plan.stages
    return rlplace.estimate(instance, replace(plan, stages=(replace(stage, shares=shares),)))


def test_the_faster_cards_take_more() -> None:
    equal, uneven = _estimate(800, ()), _estimate(1000, (300, 300, 200, 200))
    assert equal.step_time == pytest.approx(uneven.step_time, rel=0.05), "the slow cards set it"
    assert 1000 / uneven.step_time > 1.15 * 800 / equal.step_time


def test_shares_of_equal_size_change_nothing() -> None:
    equal, named = _estimate(800, ()), _estimate(800, (200, 200, 200, 200))
    assert named.step_time == pytest.approx(equal.step_time, rel=1e-9)
    assert named.peak_memory == pytest.approx(equal.peak_memory, rel=1e-9)


def test_each_card_holds_its_own_samples() -> None:
    equal, uneven = _estimate(800, ()), _estimate(1000, (300, 300, 200, 200))
    activations = [use.activations for use in uneven.memory]
    assert activations[2:] == pytest.approx([use.activations for use in equal.memory[2:]])
    assert activations[0] == pytest.approx(1.5 * activations[2], rel=0.02)


def test_planners_propose_the_uneven_batch() -> None:
    """Of 1000 samples at once, on all four cards."""
    cluster = Cluster.parse("1x(2xA6000-48+2x2080Ti-11)")
    instance = rlplace.Instance(_graph(), cluster, 1000, precision="fp16-mixed")
    found = poplar(instance, Budget(), np.random.default_rng(0))
    assert found.plan is not None
    assert found.estimate is not None
    (stage,) = found.plan.stages
    assert sorted(stage.mesh.devices) == [0, 1, 2, 3]
    share = dict(zip(stage.mesh.devices, stage.shares, strict=True))
    assert min(share[0], share[1]) > 1.2 * max(share[2], share[3]), "the A6000 take more"
    equal = _estimate(1000, (250, 250, 250, 250))
    by_hand = _estimate(1000, (300, 300, 200, 200))
    assert found.estimate.step_time <= min(equal.step_time, by_hand.step_time)
    assert found.estimate.step_time < 0.9 * equal.step_time
