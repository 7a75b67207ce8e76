from __future__ import annotations

import json
from typing import Any

import pytest

from rlplace.errors import InputError
from rlplace.graph.formats.dnn_partitioning import read_dnn_partitioning
from rlplace.graph.formats.read import read_instances
from rlplace.graph.formats.types import LoadCosts
from tests.graph.formats.examples import dnn_partitioning, dnn_partitioning_table, shared


def costs_of(data: Any) -> LoadCosts:
    costs = read_dnn_partitioning(data, "tiny").costs
    assert isinstance(costs, LoadCosts)
    return costs


def test_nodes_come_in_topological_order_with_their_costs() -> None:
    found = read_dnn_partitioning(dnn_partitioning(), "tiny")
    assert [group.name for group in found.graph.groups] == ["a", "b", "c", "d"]
    assert found.positions == (1, 2, 3, 0)
    assert found.from_file_order([3, 0, 1, 2]) == (0, 1, 2, 3)
    costs = costs_of(dnn_partitioning())
    assert costs.cpu_times == (10.0, 20.0, 30.0, 40.0)
    assert costs.accelerator_times == (1.0, 2.0, 3.0, 4.0)
    assert costs.on_accelerator == (True, False, True, True)
    assert costs.memory == (50.0, 0.0, 50.0, 60.0)
    assert costs.transfers == (0.5, 0.25, 0.125, 0.0)
    assert costs.colors == (1, None, 1, None)
    assert (costs.cpus, costs.accelerators, costs.memory_cap) == (1, 2, 100.0)
    assert found.graph.edges[0].other_bytes(1) == 8


def test_the_table_form_says_the_same() -> None:
    table, objects = costs_of(dnn_partitioning_table()), costs_of(dnn_partitioning())
    for field in ("cpu_times", "accelerator_times", "memory", "transfers", "on_accelerator"):
        assert getattr(table, field) == getattr(objects, field)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d["nodes"][1].pop("fpgaLatency"), r"nodes.1.fpgaLatency.*missing"),
        (lambda d: d.pop("maxCPUs"), "maxCPUs.*missing"),
        (lambda d: d["nodes"][0].update(cpuLatency=-1), "nodes.0.cpuLatency=-1"),
        (lambda d: d["nodes"][0].update(cpuLatency="fast"), "nodes.0.cpuLatency='fast'"),
        (lambda d: d["nodes"][0].update(id=10), "10.*two nodes have this id"),
        (lambda d: d["edges"][0].update(destId=99), "99.*does not exist"),
        (lambda d: d["edges"][1].update(cost=9.0), "out of node 10 must have the same cost"),
        (lambda d: d["edges"].append({"sourceId": 13, "destId": 10, "cost": 0}), "has a cycle"),
    ],
)
def test_malformed_files_are_refused(change: Any, message: str) -> None:
    data = dnn_partitioning()
    change(data)
    with pytest.raises(InputError, match=message):
        read_dnn_partitioning(data, "tiny")


def test_a_row_of_the_wrong_length_is_refused() -> None:
    data = dnn_partitioning_table()
    data["nodes"][2] = [1.0]
    with pytest.raises(InputError, match=r"nodes.2.*must be a list of cpuLatency"):
        read_dnn_partitioning(data, "tiny")


def test_the_published_graphs_are_read() -> None:
    path = shared("dnn_partitioning_graphs.json")
    published = json.loads(path.read_text())
    instances = read_instances(path)
    assert len(instances) == 24
    for name, found in instances.items():
        wanted = published[name]
        assert len(found.graph.groups) == wanted["n_nodes"]
        assert len(found.graph.edges) == wanted["n_edges"]
        assert isinstance(found.costs, LoadCosts)
        column = wanted["cols"].index("fpgaLatency")
        total = sum(row[column] for row in wanted["nodes"])
        assert sum(found.costs.accelerator_times) == pytest.approx(total)
        assert found.costs.accelerators == wanted["maxFPGAs"]
