"""The lower bound of the step time."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rlplace.cluster.types import Link
from rlplace.plan.testing import chain, cluster, round_kind, transformer
from rlplace.plan.types import Instance
from rlplace.plan.uniform import uniform_plan
from rlplace.planners.exhaustive import all_plans
from rlplace.simulate.bound import bound
from rlplace.simulate.estimate import Estimator, estimate

_KIND = round_kind()


def test_total_flops_over_total_peak() -> None:
    instance = Instance(chain([1e9, 2e9, 3e9]), cluster([[_KIND] * 4]), 16)
    assert bound(instance) == pytest.approx(16 * 18e9 / 4e12)


def test_devices_of_unequal_speed_add_up() -> None:
    instance = Instance(chain([1e9] * 4), cluster([[_KIND, round_kind("slow", 0.5)]]), 8)
    assert bound(instance) == pytest.approx(8 * 12e9 / 1.5e12)


def test_ranks_on_one_core_count_once() -> None:
    shared = cluster([[_KIND] * 4], cores=(0, 1, 0, 1))
    assert bound(Instance(chain([1e9]), shared, 8)) == pytest.approx(8 * 3e9 / 2e12)
    hosts = cluster([[_KIND] * 2] * 2, cores=(0, 0, 0, 0))
    assert bound(Instance(chain([1e9]), hosts, 8)) == pytest.approx(8 * 3e9 / 2e12)


def test_one_sample_passes_all_groups_in_turn() -> None:
    """More devices than samples: the path is longer than the share of the work."""
    instance = Instance(chain([1e9] * 4), cluster([[_KIND] * 8]), 1)
    assert bound(instance) == pytest.approx(12e9 / 1e12)
    kind = replace(_KIND, launch_overhead=1e-3)
    slow = Instance(transformer(1), cluster([[kind] * 8]), 1)
    kernels = sum(slow.graph.structure(g.index).work.kernels for g in slow.graph.groups)
    assert bound(slow) >= 3 * kernels * 1e-3


def test_it_is_tight_where_nothing_is_lost() -> None:
    instance = Instance(chain([1e9] * 4), cluster([[_KIND] * 4], intra=Link(1e30, 0.0)), 8)
    found = estimate(instance, uniform_plan(instance, micro_batches=1))
    assert found.step_time == pytest.approx(bound(instance))


@pytest.mark.parametrize(
    "instance",
    [
        Instance(
            chain([1e9, 3e9, 2e9], floats=1e5, params=10**6),
            cluster([[_KIND, _KIND, round_kind("slow", 0.4)]]),
            4,
            zero_levels=(0, 3),
            recompute_modes=("none",),
        ),
        Instance(
            transformer(1, 64, degrees=(2,)),
            cluster([[_KIND] * 2], intra=Link(1e14, 0.0)),
            2,
            zero_levels=(0,),
            recompute_modes=("none",),
        ),
        Instance(chain([1e9, 3e9, 2e9]), cluster([[_KIND] * 3], cores=(0, 0, 1)), 6),
    ],
    ids=["mixed", "tp", "cores"],
)
def test_below_every_plan_there_is(instance: Instance) -> None:
    estimator, least = Estimator(instance), bound(instance)
    times = [estimator.estimate(plan).step_time for plan in all_plans(instance)]
    assert len(times) > 40
    assert least <= min(times) * (1 + 1e-9)
    assert min(times) <= 2 * least, "and not far below the best"


@pytest.mark.parametrize("memory", [1e3, 1e6, 2e6])
def test_a_device_with_too_little_memory_leaves_a_bound(memory: float) -> None:
    """It may hold no group at all, or a part of them."""
    small = round_kind("small", memory=memory)
    instance = Instance(
        transformer(1, 64, degrees=(2,)),
        cluster([[round_kind("big", memory=12e6), small]]),
        2,
        precision="fp32",
        zero_levels=(0, 3),
    )
    estimator, least = Estimator(instance), bound(instance)
    found = [estimator.estimate(plan) for plan in all_plans(instance)]
    times = [one.step_time for one in found if one.feasible]
    assert times
    assert 0.0 < least <= min(times) * (1 + 1e-9)
