from __future__ import annotations

import json
from typing import Any

import pytest

from rlplace.errors import InputError
from rlplace.graph.formats.doppler import is_doppler_text, read_doppler, read_doppler_text
from rlplace.graph.formats.read import instance_names, read_instance
from rlplace.graph.formats.types import EventCosts
from tests.graph.formats.examples import DOPPLER_TEXT, doppler, shared


def test_text_and_json_say_the_same() -> None:
    text, data = read_doppler_text(DOPPLER_TEXT, "tiny", 2), read_doppler(doppler(), "tiny")
    assert text == data
    costs = text.costs
    assert isinstance(costs, EventCosts)
    assert costs.compute == (1.0, 2.0, 2.0, 1.0)
    assert costs.sizes == (4.0, 4.0, 1.0, 1.0)
    assert costs.transfer_rates == ((0.0, 1.0), (1.0, 0.0))
    assert costs.legal == ((0, 1),) * 4
    names = ["fill0", "einsummable1", "einsummable2", "select3"]
    assert [group.name for group in text.graph.groups] == names


def test_types_may_be_absent() -> None:
    head, rows = DOPPLER_TEXT.splitlines()[:4], DOPPLER_TEXT.splitlines()[4:]
    untyped = [*head, *(",".join(row.split(",")[:2]) for row in rows)]
    found = read_doppler_text("\n".join(untyped), "tiny", 2)
    assert [group.name for group in found.graph.groups] == ["op0", "op1", "op2", "op3"]


def test_the_number_of_devices_has_to_come_from_somewhere() -> None:
    with pytest.raises(InputError, match="does not say how many devices"):
        read_doppler_text(DOPPLER_TEXT, "tiny")
    assert isinstance(found := read_doppler(doppler(), "tiny", 5).costs, EventCosts)
    assert found.devices == 5


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("1, 2, 3, 3,", "1, 2, 3,", "length of targets=3"),
        ("5\n", "6\n", "length of nodes=4"),
        ("1, 2, 3, 3,", "1, 2, 3, 9,", "9.*does not exist"),
        ("20000000000,10000000000,einsummable", "einsummable", "must be compute,transfer"),
        ("5\n", "nodes\n", "must begin with the number of nodes"),
    ],
)
def test_malformed_texts_are_refused(old: str, new: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        read_doppler_text(DOPPLER_TEXT.replace(old, new, 1), "tiny", 2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"comm": [1.0]}, "length of comm=1"),
        ({"edges": [[0, 1], [1, 0]]}, "fill0 -> einsummable1 -> fill0.*cycle"),
        ({"comp": "fast"}, "comp='fast'"),
    ],
)
def test_malformed_json_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        read_doppler({**doppler(), **change}, "tiny")


def test_other_texts_are_not_taken_for_doppler() -> None:
    assert is_doppler_text(DOPPLER_TEXT)
    assert not is_doppler_text('{"comp": []}')
    assert not is_doppler_text("5\n")


def test_the_published_graphs_are_read() -> None:
    path = shared("doppler_graphs.json")
    published = json.loads(path.read_text())
    assert len(instance_names(path)) == 6
    for name in instance_names(path):
        found, wanted = read_instance(path, name), published[name]
        assert len(found.graph.groups) == wanted["n_nodes"]
        assert len(found.graph.edges) == wanted["n_edges"]
        assert isinstance(found.costs, EventCosts)
        assert found.costs.devices == wanted["default_devices"]
        assert sum(found.costs.compute) == pytest.approx(sum(wanted["comp"]) / 1e10)
        # Ties go by the order of the file, so it has to be kept.
        assert found.positions == tuple(range(wanted["n_nodes"]))
