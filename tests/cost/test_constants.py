"""Tests of the names of constants, and of giving them other values."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlplace.cluster.types import Cluster
from rlplace.cost.constants import Range, apply, apply_all, constants_of, range_of, split_name
from rlplace.errors import InputError
from rlplace.plan import testing
from rlplace.plan.frameworks import Framework
from rlplace.plan.types import Instance

GRAPH = testing.chain([1e12, 1e12])


def mixed() -> Instance:
    """Two kinds, two networks."""
    cluster = Cluster.parse("2xA100-80:ib200+4xV100-16:eth25")
    return Instance(GRAPH, cluster, 8, "fp16-mixed", framework=Framework("own", launch=1e-5))


def test_every_number_of_kinds_links_and_the_framework_has_a_name() -> None:
    found = constants_of(mixed())
    assert found["kind.A100-80.bandwidth"] == 2039e9
    assert found["link.ib.bandwidth"] == 25e9
    assert found["framework.own.launch"] == 1e-5
    assert {"link.nvlink.latency", "link.eth.latency", "kind.V100-16.overlap"} <= found.keys()
    assert "framework.own.fused" not in found


def test_values_reach_kinds_links_and_framework() -> None:
    values = {
        "kind.V100-16.max_efficiency": 0.5,
        "kind.V100-16.reserve": 1.5e9,
        "link.eth.latency": 1e-3,
        "framework.own.launch": 2e-5,
        "kind.H100-80.overlap": 0.1,
        "link.pcie.latency": 1.0,
    }
    before, after = mixed(), apply(mixed(), values)
    assert after.cluster.kind(2).max_efficiency == 0.5
    assert after.cluster.kind(2).reserve == 1_500_000_000
    assert isinstance(after.cluster.kind(2).reserve, int)
    assert after.cluster.kind(0) == before.cluster.kind(0)
    assert after.cluster.nodes[1].nic is not None
    assert after.cluster.nodes[1].nic.latency == 1e-3
    assert after.cluster.nodes[0] == before.cluster.nodes[0]
    assert after.execution.launch == 2e-5
    found = constants_of(after)
    assert {name: found[name] for name in values if name in found} == {
        name: value for name, value in values.items() if name in found
    }


def test_what_is_one_object_stays_one_object() -> None:
    first, values = mixed(), {"link.ib.latency": 1e-5}
    second = Instance(GRAPH, first.cluster, 16, "fp16-mixed")
    made = apply_all([first, second, first], values)
    assert made[0] is made[2]
    assert made[0].cluster is made[1].cluster
    assert apply_all([first], {})[0].cluster is first.cluster


def test_links_of_single_pairs_change_too() -> None:
    cluster = Cluster.parse("4x3090-24")
    bridge = cluster.nodes[0].intra
    pairs = Cluster(
        cluster.devices, cluster.nodes, cluster.kinds, overrides=((0, 1, bridge),), name="pairs"
    )
    made = apply(Instance(GRAPH, pairs, 8), {"link.pcie.latency": 1e-4})
    assert made.cluster.link(0, 1).latency == made.cluster.link(2, 3).latency == 1e-4


def test_a_constant_that_its_owner_lacks_is_refused() -> None:
    with pytest.raises(InputError, match="max_efficiency"):
        apply(mixed(), {"kind.A100-80.max_eficiency": 0.5})


def test_a_name_has_three_parts_and_the_owner_may_have_dots() -> None:
    assert split_name("framework.torch-2.13.launch") == ("framework", "torch-2.13", "launch")
    for name in ("launch", "kind.launch", "node.x.launch", "kind..launch"):
        with pytest.raises(InputError, match="FIELD"):
            split_name(name)


@given(st.floats(1e-9, 1e3), st.sampled_from(["launch", "overlap", "max_efficiency", "half_flops"]))
def test_what_a_fit_works_with_is_the_value_again(value: float, field: str) -> None:
    limits = range_of(f"kind.card.{field}", value)
    again = limits.decode(limits.encode(value))
    assert again == pytest.approx(min(max(value, limits.low), limits.high))


def test_shares_may_be_zero_and_factors_may_not() -> None:
    assert Range(0.0, 1.0).decode(0.0) == 0.0
    assert not Range(0.0, 1.0).logarithmic
    assert range_of("kind.card.bandwidth", 1e12) == Range(1e12 / 30, 3e13)
    with pytest.raises(InputError, match="nowhere to start"):
        range_of("kind.card.bandwidth", 0.0)
