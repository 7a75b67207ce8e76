"""Descent from a plan."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np

from rlplace.bench.suites import suite
from rlplace.plan.check import check
from rlplace.plan.testing import chain, cluster, round_kind
from rlplace.plan.types import Instance, Mesh
from rlplace.plan.uniform import uniform_plan
from rlplace.planners.best_stages import Stages
from rlplace.planners.costing import Costing
from rlplace.planners.descent import descend, rescheduled
from rlplace.planners.search import Search, objective
from rlplace.planners.types import Budget


def test_it_goes_down_and_stays_where_nothing_is_lower() -> None:
    improved = 0
    for problem in suite("tiny", 20):
        instance = problem.instance
        if len(instance.cluster.devices) < 2:
            continue
        costing = Costing(instance)
        search, stages = Search("descent", costing, Budget()), Stages(costing)
        start = uniform_plan(instance, pp=2, devices=(0, 1), cuts=(1,))
        before = objective(instance, search.offer(start))
        reached = descend(search, stages, start, before, 500)
        check(instance, reached)
        after = objective(instance, search.offer(reached))
        assert after <= before
        improved += after < before
        assert descend(search, stages, reached, after, 500) == reached
    assert improved >= 10


def test_it_keeps_to_its_evaluations() -> None:
    instance = suite("tiny")[15].instance
    costing = Costing(instance)
    search = Search("descent", costing, Budget())
    start = uniform_plan(instance, pp=2, devices=(0, 1), cuts=(1,))
    descend(search, Stages(costing), start, float("inf"), 2)
    assert search.evaluations == 2
    assert np.isfinite(search.result().seconds)


def test_schedules_that_are_offered_are_chosen_where_they_are_quicker() -> None:
    # Four stages and few micro-batches: 1F1B leaves a bubble that a V without bubbles does not.
    plain = Instance(
        chain([1e9] * 16, floats=1e3, params=10),
        cluster([[round_kind()] * 4]),
        8,
        zero_levels=(0,),
        recompute_modes=("none",),
    )
    offered = replace(plain, schedules=("1f1b", "interleaved", "zb-h1", "zb-v"))
    start = uniform_plan(plain, pp=4, micro_batches=8)
    reached = {}
    for instance in (plain, offered):
        search = Search("descent", Costing(instance), Budget())
        value = objective(instance, search.offer(start))
        reached[instance.schedules] = descend(search, Stages(search.costing), start, value, 500)
        check(instance, reached[instance.schedules])
    one, other = reached.values()
    assert one.schedule == "1f1b"
    assert other.schedule != "1f1b"
    estimator = Costing(plain).estimator
    assert estimator.estimate(other).step_time < 0.9 * estimator.estimate(one).step_time


def test_lanes_keep_their_part_of_the_work_in_every_schedule() -> None:
    names = ("1f1b", "gpipe", "interleaved", "zb-h1", "zb-v")
    instance = Instance(
        chain([1e9] * 24, floats=1e3, params=10),
        cluster([[round_kind()] * 2]),
        8,
        zero_levels=(0,),
        schedules=names,
    )
    plan = uniform_plan(instance, pp=2, micro_batches=8, cuts=(12,))
    found = list(rescheduled(Stages(Costing(instance)), plan))
    assert {other.schedule for other in found} == set(names) - {"1f1b"}
    for other in found:
        check(instance, other)
        groups = Counter[Mesh]()
        for stage in other.stages:
            groups[stage.mesh] += stage.stop - stage.start
        assert set(groups.values()) == {12}


def test_micro_batches_stay_multiples_of_the_lanes_where_stages_are_interleaved() -> None:
    instance = Instance(
        chain([1e9] * 24, floats=1e3, params=10),
        cluster([[round_kind()] * 4]),
        36,
        zero_levels=(0,),
        recompute_modes=("none",),
        schedules=("interleaved",),
    )
    start = uniform_plan(instance, pp=4, micro_batches=12, schedule="interleaved")
    search = Search("descent", Costing(instance), Budget())
    value = objective(instance, search.offer(start))
    reached = descend(search, Stages(search.costing), start, value, 200)
    check(instance, reached)
    assert reached.micro_batches % 4 == 0
