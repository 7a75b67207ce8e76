"""Tests of laying fitted constants over the catalogue's."""

from __future__ import annotations

import pytest

from rlplace.cluster.calibrated import calibrated_kind, calibrated_link, link_family, overlaid
from rlplace.cluster.types import DeviceKind, Link
from rlplace.errors import InputError


def test_a_family_is_the_name_without_its_figures() -> None:
    names = ("ib3200", "eth2.5", "nvlink", "")
    assert [link_family(name) for name in names] == ["ib", "eth", "nvlink", ""]


def test_what_nothing_was_fitted_to_stays() -> None:
    kind, link = DeviceKind("no such card", 1, {}, 1.0), Link(1.0, 1.0, "no such link")
    assert calibrated_kind(kind) == kind
    assert calibrated_link(link) == link


def test_numbers_are_replaced_and_keep_their_type() -> None:
    kind = overlaid(DeviceKind("card", 1, {}, 1.0), {"reserve": 2.6, "overlap": 0.5}, "card")
    assert (kind.reserve, kind.overlap) == (2, 0.5)
    with pytest.raises(InputError, match="latency") as refused:
        overlaid(Link(1.0, 1.0), {"latenz": 1.0}, "links.ib")
    assert refused.value.nearest == "latency"
