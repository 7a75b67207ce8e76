from __future__ import annotations

import json
from typing import Any

import pytest

from rlplace.errors import InputError
from rlplace.graph.formats.giph import giph_names, read_giph
from rlplace.graph.formats.read import instance_names, read_instance
from rlplace.graph.formats.types import EventCosts
from tests.graph.formats.examples import giph, shared


def test_network_and_program_make_an_instance() -> None:
    assert giph_names(giph()) == ["0/0"]
    costs = read_giph(giph(), "0/0").costs
    assert isinstance(costs, EventCosts)
    assert costs.compute == (1.0, 4.0, 2.0, 1.0)
    assert costs.sizes == (8.0, 4.0, 2.0, 4.0)
    assert costs.rates == (1.0, 2.0)
    assert costs.transfer_rates == ((0.0, 0.5), (0.25, 0.0))
    assert costs.legal == ((0, 1), (0,), (0, 1), (0, 1))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d["networks"][0].pop("comm_rate"), "networks.0: comm_rate.*missing"),
        (lambda d: d["networks"][0]["comm_rate"].pop(), "row lengths of comm_rate"),
        (lambda d: d["networks"][0]["device_constraints"].pop("1"), "must name the devices 0 to 1"),
        (lambda d: d["programs"][0]["type"].pop(), "length of type=3"),
        (lambda d: d["programs"][0].update(type=[0, 7, 0, 0]), "7.*no device of networks.0"),
        (lambda d: d["programs"][0]["edges"].append([3, 0, 1.0]), "has a cycle"),
        (lambda d: d["programs"][0]["edges"].append([3, 4, 1.0]), "4.*does not exist"),
    ],
)
def test_malformed_files_are_refused(change: Any, message: str) -> None:
    data = giph()
    change(data)
    with pytest.raises(InputError, match=message):
        read_giph(data, "0/0")


def test_an_unknown_instance_is_refused() -> None:
    with pytest.raises(InputError, match=r"network/program"):
        read_giph(giph(), "0/1")


def test_the_published_instances_are_read() -> None:
    path = shared("giph_small8dev.json")
    published = json.loads(path.read_text())
    assert len(instance_names(path)) == len(published["networks"]) * len(published["programs"])
    for index, program in enumerate(published["programs"]):
        found = read_instance(path, f"0/{index}")
        assert len(found.graph.groups) == len(program["compute"])
        assert len(found.graph.edges) == len(program["edges"])
        assert isinstance(found.costs, EventCosts)
        assert sum(found.costs.compute) == pytest.approx(sum(program["compute"]))
