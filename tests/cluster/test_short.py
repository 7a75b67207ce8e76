"""The short form of a cluster."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlplace.cluster.catalogue import DEVICE_KINDS
from rlplace.cluster.short import parse_cluster
from rlplace.cluster.types import Cluster
from rlplace.errors import InputError


@pytest.mark.parametrize(
    ("text", "devices", "nodes", "islands"),
    [
        ("8xA100-80", 8, 1, [8]),
        ("4x8xH100-80:ib3200", 32, 4, [32]),
        ("8xH100-80:pcie", 8, 1, [8]),
        ("8xV100-16+8xA100-40", 16, 2, [8, 8]),
        ("2x(2x3080-10+2x4090-24):eth25", 8, 2, [4, 4]),
        (" 2 x 8xa100-80 : pcie : ib200 ", 16, 2, [16]),
    ],
)
def test_forms(text: str, devices: int, nodes: int, islands: list[int]) -> None:
    cluster = Cluster.parse(text)
    assert [device.index for device in cluster.devices] == list(range(devices))
    assert len(cluster.nodes) == nodes
    assert [len(island) for island in cluster.islands] == islands
    assert cluster.name == text.strip()


def test_links_are_as_named() -> None:
    cluster = parse_cluster("2x4xH100-80:pcie:ib400")
    assert cluster.link(0, 3).bandwidth == 63e9
    assert cluster.link(0, 4).bandwidth == 50e9


def test_one_node_has_no_nic_unless_named() -> None:
    assert parse_cluster("8xA100-80").nodes[0].nic is None
    assert parse_cluster("8xA100-80:ib200").nodes[0].nic is not None


def test_mixed_node_and_mixed_nodes() -> None:
    cluster = parse_cluster("2x(1xT4+1x4090-24):eth10")
    assert cluster.islands == ((0, 2), (1, 3))
    assert cluster.link(0, 1).bandwidth == 15.75e9, "the slower card's slot"
    mixed = parse_cluster("8xV100-16+8xA100-40")
    assert mixed.link(0, 8).bandwidth == 50e9, "the slower node's network"


kinds = st.sampled_from(sorted(DEVICE_KINDS))
hosts = st.builds("{}x{}x{}{}".format, st.integers(1, 3), st.integers(1, 4), kinds,
                  st.sampled_from(["", ":pcie", ":ib200", ":pcie:eth25"]))  # fmt: skip


@given(st.lists(hosts, min_size=1, max_size=3).map("+".join), st.data())
def test_links_are_symmetric(text: str, data: st.DataObject) -> None:
    cluster = parse_cluster(text)
    ranks = st.integers(0, len(cluster.devices) - 1)
    a, b = data.draw(ranks), data.draw(ranks)
    assert cluster.link(a, b) == cluster.link(b, a) if a != b else True
    assert sorted(rank for island in cluster.islands for rank in island) == list(
        range(len(cluster.devices))
    )


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("", "not of the form"),
        ("A100-80", "not of the form"),
        ("8xA100-80+", "not of the form"),
        ("2x(2xT4", "not of the form"),
        ("2x()", "not of the form DEVICESxKIND"),
        ("2x(2x(1xT4))", "not of the form"),
        ("0xT4", "1 to 65536"),
        ("99999999999xT4", "1 to 65536"),
        ("9999x9999xT4", "1 to 65536"),
        ("8xA100", "not a device kind"),
        ("8xT4:foo", "is not a link"),
        ("8xT4:", "is not a link"),
        ("8xT4:nvlink", "no NVLink"),
        ("2x8xT4:ib200:eth25", "two links between nodes"),
        ("8xA100-80:pcie:nvlink", "two links inside a node"),
    ],
)
def test_bad_forms(text: str, rule: str) -> None:
    with pytest.raises(InputError, match=rule):
        parse_cluster(text)
