"""Which link limits a plan, on clusters whose links are slow, fast or measured."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rlplace.cluster.types import CollectiveCurve, Link
from rlplace.plan.testing import chain, cluster, round_kind
from rlplace.plan.types import Instance
from rlplace.plan.uniform import uniform_plan
from rlplace.report.explain_links import (
    explain_links,
    fewer_gathers,
    link_seconds,
    sharded_inside,
)
from rlplace.simulate.estimate import estimate

_FAST, _SLOW = Link(1e12, 0.0, "fast"), Link(1e9, 0.0, "slow")
#: 100 million parameters: a second of compute, 0.8 s for 400 MB over the slow link.
_GRAPH = chain([1e11] * 4, params=25 * 10**6)


def _instance(intra: Link, nic: Link, nodes: int = 2) -> Instance:
    machines = cluster([[round_kind()] * 2] * nodes, intra=intra, nic=nic)
    return Instance(_GRAPH, machines, 8, precision="fp32")


def test_what_a_place_costs_is_what_the_collectives_take() -> None:
    instance = _instance(_FAST, _SLOW)
    plan = uniform_plan(instance)
    found = estimate(instance, plan)
    lost = link_seconds(instance, plan, found)
    exposed = found.critical.exposed_reduce
    assert lost["nic"] == pytest.approx(exposed, rel=0.01)
    assert lost["intra"] == pytest.approx(0.0, abs=0.01 * exposed)


def test_the_slow_link_is_told_and_sharding_inside_the_node() -> None:
    instance = _instance(_FAST, _SLOW)
    plan = uniform_plan(instance, zero=3)
    told = explain_links(instance, plan, estimate(instance, plan))
    assert told[0].startswith("the slow link is slow (1 GB/s a node) between nodes: ")
    assert "(dp_replicate=2, dp_shard=2) takes" in told[1]
    inside = sharded_inside(instance.cluster, plan)
    assert inside == uniform_plan(instance, zero=3, dp_replicate=2, dp_shard=2)
    assert estimate(instance, inside).step_time < estimate(instance, plan).step_time


def test_fewer_gathers_are_told_where_they_fit() -> None:
    instance = _instance(_SLOW, _FAST, nodes=1)
    plan = uniform_plan(instance, zero=3, micro_batches=4)
    told = explain_links(instance, plan, estimate(instance, plan))
    assert told[0].startswith("the slow link is slow (1 GB/s a device) inside a node: ")
    assert "in place of ZeRO-3 takes" in told[1]
    levels = [
        max(c.zero for s in fewer_gathers(plan, n).stages for c in s.choices) for n in range(4)
    ]
    assert levels == [0, 1, 2, 3]
    states = estimate(instance, plan).peak_memory[0]
    kind = round_kind(memory=1.05 * states)
    tight = replace(instance, cluster=replace(instance.cluster, kinds=(kind,)), memory_margin=0.0)
    same = uniform_plan(tight, zero=3, micro_batches=4)
    assert len(explain_links(tight, same, estimate(tight, same))) == 1, "no change fits"


def test_nothing_is_told_where_no_link_is_slow() -> None:
    instance = _instance(_FAST, _FAST)
    plan = uniform_plan(instance, zero=3)
    assert explain_links(instance, plan, estimate(instance, plan)) == []


def test_measured_collectives_do_not_say_where_they_run() -> None:
    curve = CollectiveCurve("all_reduce", 2, 1.0, 0.0)
    measured = cluster([[round_kind()] * 2], curves=(curve,))
    instance = Instance(_GRAPH, measured, 8, precision="fp32")
    plan = uniform_plan(instance)
    assert link_seconds(instance, plan, estimate(instance, plan)) == {}
    assert explain_links(instance, plan, estimate(instance, plan)) == []


def test_a_mesh_that_is_not_whole_nodes_stays() -> None:
    instance = _instance(_FAST, _SLOW)
    three = uniform_plan(replace(instance, global_batch=9), zero=3, devices=(0, 1, 2), dp_shard=3)
    assert sharded_inside(instance.cluster, three) == three
    inside = uniform_plan(instance, zero=3, dp_replicate=2, dp_shard=2)
    assert sharded_inside(instance.cluster, inside) == inside
