"""JSON of msr-fiddle/dnn-partitioning.

Tarnawski et al., "Efficient Algorithms for Device Placement of DNN Graph Operators", NeurIPS 2020.
As published (objects with ``id``, ``cpuLatency``, ... and edges with ``sourceId``), or as a table:
``cols`` names the columns of ``nodes``, and an edge is ``[source, target, cost]`` with positions
instead of ids.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from rlplace.errors import InputError
from rlplace.graph.formats.parse import (
    Amount,
    Count,
    FileEdge,
    assemble,
    find,
    parse,
    positions_of,
)
from rlplace.graph.formats.types import GivenInstance, LoadCosts

#: The publishers refuse a node whose outgoing edges differ by more.
_SAME_COST = 1e-6


class _Node(BaseModel):
    id: int
    supportedOnFpga: bool
    cpuLatency: Amount
    fpgaLatency: Amount
    isBackwardNode: bool
    size: Amount = 0.0
    colorClass: int | None = None
    name: str = ""


class _Edge(BaseModel):
    sourceId: int
    destId: int
    cost: Amount
    size: Amount = 0.0


class _Table(BaseModel):
    cols: list[str]
    nodes: list[list[Any]]
    edges: list[tuple[int, int, Amount]]


class _File(BaseModel):
    maxSizePerFPGA: Amount
    maxFPGAs: Count
    maxCPUs: Count
    nodes: list[_Node]
    edges: list[_Edge]


def is_dnn_partitioning(data: Any) -> bool:
    """Whether JSON data is of this format."""
    return isinstance(data, dict) and "nodes" in data and "maxFPGAs" in data


def read_dnn_partitioning(data: Any, name: str) -> GivenInstance:
    """An instance from JSON data.

    Args:
        data: Content of the file.
        name: Name of the instance.

    Raises:
        InputError: On a field that is missing or wrong, an unknown or repeated node, a cycle, or
            outgoing edges of one node with different costs (the format has one cost a node).
    """
    file = parse(_File, _rows_to_objects(data, name), name)
    edges, transfers = _edges(file, name)
    per_node = [
        (n.cpuLatency, n.fpgaLatency, n.size, n.supportedOnFpga, n.isBackwardNode, cost)
        for n, cost in zip(file.nodes, transfers, strict=True)
    ]
    made = assemble(name, [_label(node) for node in file.nodes], edges, per_node)
    nodes = [file.nodes[position] for position in made.positions]
    costs = LoadCosts(
        cpu_times=tuple(node.cpuLatency for node in nodes),
        accelerator_times=tuple(node.fpgaLatency for node in nodes),
        on_accelerator=tuple(node.supportedOnFpga for node in nodes),
        memory=tuple(node.size for node in nodes),
        transfers=tuple(transfers[position] for position in made.positions),
        backward=tuple(node.isBackwardNode for node in nodes),
        colors=tuple(node.colorClass for node in nodes),
        cpus=file.maxCPUs,
        accelerators=file.maxFPGAs,
        memory_cap=file.maxSizePerFPGA,
    )
    return GivenInstance(name, "dnn-partitioning", made.graph, costs, made.positions)


def _rows_to_objects(data: Any, name: str) -> Any:
    """The table form as the published one; anything else is returned as it is."""
    if not isinstance(data, dict) or "cols" not in data:
        return data
    table = parse(_Table, data, name)
    nodes = []
    for position, row in enumerate(table.nodes):
        if len(row) != len(table.cols):
            rule = f"must be a list of {', '.join(table.cols)}"
            raise InputError(f"{name}: nodes.{position}", row, rule)
        nodes.append({"id": position, **dict(zip(table.cols, row, strict=True))})
    edges = [{"sourceId": src, "destId": dst, "cost": cost} for src, dst, cost in table.edges]
    return {**data, "nodes": nodes, "edges": edges}


def _edges(file: _File, name: str) -> tuple[list[FileEdge], list[float]]:
    """Edges by position, and the transfer cost of each node's output."""
    place = positions_of([node.id for node in file.nodes], name)
    costs: dict[int, float] = {}
    edges = []
    for edge in file.edges:
        src = find(place, edge.sourceId, name)
        first = costs.setdefault(src, edge.cost)
        if abs(first - edge.cost) > _SAME_COST:
            rule = f"all edges out of node {edge.sourceId} must have the same cost"
            raise InputError(f"{name}: edges.cost", edge.cost, rule, first)
        edges.append(FileEdge(src, find(place, edge.destId, name), edge.size))
    return edges, [costs.get(position, 0.0) for position in range(len(file.nodes))]


def _label(node: _Node) -> str:
    return node.name or str(node.id)
