"""Links by name, and what the catalogue says of them."""

from __future__ import annotations

import pytest

from rlplace.cluster.links import (
    LINK_KINDS,
    STAGED,
    default_links,
    named_link,
    network_link,
    node_link,
)
from rlplace.errors import InputError


def test_links_by_name() -> None:
    assert network_link("ib3200").bandwidth == 400e9
    assert network_link("eth25").bandwidth == 3.125e9
    assert node_link("pcie", "H100-80").bandwidth == 63e9
    assert named_link("nvlink", ["V100-16", "A100-40"]).bandwidth == 150e9
    assert network_link("eth25").latency > network_link("ib200").latency


@pytest.mark.parametrize("name", ["ib", "ib0", "ethernet", "200", "eth-5", ""])
def test_unknown_link(name: str) -> None:
    with pytest.raises(InputError, match="is not a link"):
        network_link(name)


def test_links_in_the_wrong_place() -> None:
    with pytest.raises(InputError, match="joins devices of a node"):
        network_link("pcie")
    with pytest.raises(InputError, match="joins nodes"):
        node_link("ib200", "A100-80")
    with pytest.raises(InputError, match="T4 has no NVLink"):
        node_link("nvlink", "T4")


@pytest.mark.parametrize(
    ("name", "nics"),
    [("ib3200", 8), ("ib1600", 8), ("efa3200", 8), ("ib800", 4), ("opa400", 4), ("ib200", 1),
     ("eth100", 1), ("eth400", 1)],
)  # fmt: skip
def test_nics_behind_the_total_of_a_node(name: str, nics: int) -> None:
    assert network_link(name).nics == nics


@pytest.mark.parametrize("family", LINK_KINDS)
def test_constants_are_sane(family: str) -> None:
    kind = LINK_KINDS[family]
    assert 0.0 < kind.latency < 1e-3
    assert 0.2 < kind.efficiency <= 1.0
    assert 0.0 <= kind.relay < 1e-3


@pytest.mark.parametrize(
    ("kind", "measured"),
    [("A100-80", 232.5e9), ("A800-80", 158e9), ("H100-80", 370e9), ("B200", 682e9)],
)
def test_reach_of_nvlink(kind: str, measured: float) -> None:
    """Bus bandwidth of rings: NVIDIA/nccl-tests issues 175 and 212, Galvatron, ml-engineering."""
    assert node_link("nvlink", kind).speed == pytest.approx(measured, rel=0.05)


def test_fabrics() -> None:
    assert node_link("nvlink", "H100-80").reduces, "its NVSwitches add up"
    assert not node_link("nvlink", "A100-80").reduces
    assert node_link("nvlink", "V100-16").fabric == "cube"
    assert node_link("nvlink", "MI300X").fabric == "mesh"
    assert default_links("A100-80")[0].fabric == "switch"


def test_cards_without_peer_access_go_through_the_host() -> None:
    """NVIDIA's GeForce drivers have no peer access over PCIe since the RTX 20 series."""
    geforce, other = node_link("pcie", "4090-24"), node_link("pcie", "L4")
    assert geforce.bandwidth == other.bandwidth
    assert geforce.speed == pytest.approx(other.speed * STAGED)
