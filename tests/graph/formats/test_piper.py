from __future__ import annotations

import json
from typing import Any

import pytest

from rlplace.errors import InputError
from rlplace.graph.formats.piper import read_piper
from rlplace.graph.formats.read import instance_names, read_instance
from rlplace.graph.formats.types import PiperCosts
from tests.graph.formats.examples import piper, shared


def test_variants_edges_and_limits_are_read() -> None:
    found = read_piper(piper(), "tiny")
    costs = found.costs
    assert isinstance(costs, PiperCosts)
    assert [group.name for group in found.graph.groups] == ["5", "head"]
    assert [(v.degree, v.name, v.time) for v in costs.variants[1]] == [
        (1, "plain", 4.0),
        (1, "redo", 5.0),
        (2, "plain", 2.5),
    ]
    assert costs.variants[1][2].sync_in == ((0, 4.0),)
    assert costs.variants[0][0].sync_out == ((1, 0.0),)
    assert costs.edge_bytes == (16.0,)
    assert (costs.bandwidth, costs.devices, costs.memory_cap, costs.micro_batches) == (8, 4, 60, 8)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.pop("bandwidth"), "bandwidth.*missing"),
        (lambda d: d.update(bandwidth=0), "bandwidth=0"),
        (lambda d: d.update(mbsInBatch=0), "mbsInBatch=0.*at least 1"),
        (lambda d: d["nodes"][1]["TMPCs"].update({"x": []}), "nodes.1.TMPCs.x"),
        (lambda d: d["nodes"][0]["TMPCs"]["1"][0].pop("timePerSample"), "timePerSample.*missing"),
        (lambda d: d["nodes"][0]["TMPCs"]["1"][0].update(syncTimeBw={}), "exactly the other ends"),
        (lambda d: d["nodes"][1]["TMPCs"]["1"][1].update(id="plain"), "different ids"),
        (lambda d: d["edges"][0].update(sourceId=6), "6.*does not exist"),
    ],
)
def test_malformed_files_are_refused(change: Any, message: str) -> None:
    data = piper()
    change(data)
    with pytest.raises(InputError, match=message):
        read_piper(data, "tiny")


def test_the_published_graphs_are_read() -> None:
    path = shared("piper_graphs.json")
    published = json.loads(path.read_text())
    assert instance_names(path) == ["bert32a100", "gnmt", "resnet"]
    for name in instance_names(path):
        found, alone = read_instance(path, name), read_instance(shared(f"piper_dags/{name}.json"))
        assert len(found.graph.groups) == len(published[name]["nodes"])
        assert len(found.graph.edges) == len(published[name]["edges"])
        assert alone.costs == found.costs
    # Only the separate files have names of layers.
    bert = read_instance(shared("piper_dags/bert32a100.json"))
    layers = [g.name for g in bert.graph.groups if g.name.startswith("ParallelTransformerLayer")]
    assert len(layers) == 32
