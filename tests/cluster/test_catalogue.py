"""The catalogue: legal figures, names, links."""

from __future__ import annotations

import pytest

from rlplace.cluster.catalogue import (
    ALIASES,
    DEVICE_KINDS,
    ENTRIES,
    device_kind,
)
from rlplace.cluster.links import default_links
from rlplace.errors import InputError
from rlplace.units import GIB


@pytest.mark.parametrize("name", DEVICE_KINDS)
def test_figures_are_sane(name: str) -> None:
    entry = ENTRIES[name]
    kind = entry.kind
    assert kind.name == name
    assert kind.memory > 9 * GIB
    assert 1.0 * GIB <= kind.reserve <= 1.5 * GIB
    assert 100e9 < kind.bandwidth < 10e12
    assert {"fp32", "fp16"} <= kind.peak_flops.keys()
    assert kind.peak_flops["fp32"] <= kind.peak_flops["fp16"]
    assert kind.peak_flops.get("fp8", 1e18) > kind.peak_flops["fp16"]
    assert 0.4 < kind.max_efficiency <= 0.95
    assert entry.source
    assert 30 <= kind.sms <= 304
    assert 12e9 < kind.host_bandwidth < 450e9
    assert 0.0 < kind.collective_launch < 1e-3


@pytest.mark.parametrize("name", ["V100-16", "V100-32", "T4", "2080Ti-11"])
def test_volta_and_turing_have_no_bf16(name: str) -> None:
    assert "bf16" not in device_kind(name).peak_flops


def test_datasheet_figures_of_an_a100() -> None:
    kind = device_kind("A100-80")
    assert kind.peak_flops["bf16"] == 312e12
    assert kind.bandwidth == 2039e9
    assert kind.sms == 108
    assert 25.5e9 < kind.host_bandwidth < 26.5e9, "25.5-26.2 GB/s measured"
    inside, outside = default_links("A100-80")
    assert inside.bandwidth == 300e9, "NVLink 600 GB/s is 300 GB/s a direction"
    assert outside.bandwidth == 200e9, "eight NICs of 200 Gb/s"


@pytest.mark.parametrize("alias", ALIASES)
def test_aliases_and_case(alias: str) -> None:
    assert device_kind(alias) is DEVICE_KINDS[ALIASES[alias]]
    assert device_kind(alias.lower()) is device_kind(alias.upper())


@pytest.mark.parametrize(
    ("wrong", "nearest"), [("A100", "A100-40, A100-80"), ("H10080", "H100-80"), ("L40", "L40S")]
)
def test_unknown_kind_names_the_nearest(wrong: str, nearest: str) -> None:
    with pytest.raises(InputError, match="not a device kind") as caught:
        device_kind(wrong)
    assert nearest in str(caught.value.nearest)
