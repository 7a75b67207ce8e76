"""What all readers share: checked fields, and nodes and edges put in topological order."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, Field, TypeAdapter, ValidationError

from rlplace.errors import InputError
from rlplace.graph.types import Affine, Edge, Group, OpGraph, Structure, Work

Amount = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=0)]
_Model = TypeVar("_Model", bound=BaseModel)


def parse(model: type[_Model], data: Any, where: str) -> _Model:
    """Plain JSON data as a checked model.

    Raises:
        InputError: Naming the first field that is missing, of the wrong type or out of range.
    """
    try:
        return TypeAdapter(model).validate_python(data)
    except ValidationError as error:
        first = error.errors()[0]
        path = ".".join(str(part) for part in first["loc"])
        missing = first["type"] == "missing"
        value = None if missing else first.get("input")
        rule = "this field is missing" if missing else str(first["msg"])
        raise InputError(f"{where}: {path}", value, rule) from error


def same_length(where: str, expected: int, **lists: Sequence[Any]) -> None:
    """Check that lists have one entry for each node.

    Raises:
        InputError: Naming the list that has not.
    """
    for name, values in lists.items():
        if len(values) != expected:
            rule = "must have one entry for each node"
            raise InputError(f"{where}: length of {name}", len(values), rule, expected)


@dataclass(frozen=True)
class FileEdge:
    """An edge as a file has it.

    Args:
        src: Position of the producer in the list of nodes.
        dst: Position of the consumer.
        bytes: Bytes that it carries, where the format says so.
    """

    src: int
    dst: int
    bytes: float = 0.0


@dataclass(frozen=True)
class Assembled:
    """A graph, and where in the file its groups and edges came from.

    Args:
        graph: One group for each node, in topological order; edges in file order.
        positions: Position in the file of each group's node.
        groups: Group of each node of the file.
    """

    graph: OpGraph
    positions: tuple[int, ...]
    groups: tuple[int, ...]


def positions_of(ids: Sequence[int], where: str) -> dict[int, int]:
    """Position of each id in the list of nodes.

    Raises:
        InputError: If two nodes have one id.
    """
    place = {node: position for position, node in enumerate(ids)}
    if len(place) < len(ids):
        twice = next(node for node in ids if ids.count(node) > 1)
        raise InputError(f"{where}: nodes.id", twice, "two nodes have this id")
    return place


def find(place: Mapping[int, int], node: int, where: str) -> int:
    """Position of a node that an edge names.

    Raises:
        InputError: If no node has this id.
    """
    if node not in place:
        raise InputError(f"{where}: edges", node, "an edge names a node that does not exist")
    return place[node]


def assemble(
    name: str,
    nodes: Sequence[str],
    edges: Sequence[FileEdge],
    costs: Sequence[Hashable],
) -> Assembled:
    """Nodes and edges of a file as an op graph.

    Nodes keep the order of the file as far as it is a topological one.

    Args:
        name: Name of the graph; errors name it too.
        nodes: Name of each node; a name that is used twice gets a number.
        edges: In file order.
        costs: All that the file says about each node: nodes of equal costs share a structure.

    Raises:
        InputError: On an edge to a node that does not exist or to itself, an edge given twice, or
            a cycle, which is named.
    """
    nodes = _unique(nodes)
    _check_edges(name, nodes, edges)
    positions = _topological_order(name, nodes, edges)
    groups = [0] * len(nodes)
    for group, position in enumerate(positions):
        groups[position] = group
    keys = [hashlib.sha256(repr(costs[p]).encode()).hexdigest()[:16] for p in positions]
    known = {key: index for index, key in enumerate(dict.fromkeys(keys))}
    graph = OpGraph(
        name=name,
        groups=tuple(
            Group(index, nodes[p], known[keys[index]], (nodes[p],))
            for index, p in enumerate(positions)
        ),
        edges=tuple(
            Edge(groups[e.src], groups[e.dst], nodes[e.src], other_bytes=Affine(e.bytes))
            for e in edges
        ),
        structures=tuple(Structure(key, Work()) for key in known),
    )
    return Assembled(graph, tuple(positions), tuple(groups))


def _unique(names: Sequence[str]) -> list[str]:
    seen: Counter[str] = Counter()
    unique = []
    for name in names:
        seen[name] += 1
        unique.append(name if seen[name] == 1 else f"{name}#{seen[name]}")
    return unique


def _check_edges(where: str, nodes: Sequence[str], edges: Sequence[FileEdge]) -> None:
    if not nodes:
        raise InputError(f"{where}: nodes", [], "a graph needs at least one node")
    seen: set[tuple[int, int]] = set()
    for edge in edges:
        pair = (edge.src, edge.dst)
        for end in pair:
            if not 0 <= end < len(nodes):
                rule = f"an edge names a node that does not exist (there are {len(nodes)})"
                raise InputError(f"{where}: edges", end, rule)
        if edge.src == edge.dst:
            raise InputError(f"{where}: edges", nodes[edge.src], "a node cannot feed itself")
        if pair in seen:
            text = f"{nodes[edge.src]} -> {nodes[edge.dst]}"
            raise InputError(f"{where}: edges", text, "this edge is given twice")
        seen.add(pair)


def _topological_order(where: str, nodes: Sequence[str], edges: Sequence[FileEdge]) -> list[int]:
    import networkx as nx

    graph = nx.DiGraph()
    graph.add_nodes_from(range(len(nodes)))
    graph.add_edges_from((edge.src, edge.dst) for edge in edges)
    try:
        return list(nx.lexicographical_topological_sort(graph))
    except nx.NetworkXUnfeasible as error:
        around = [nodes[src] for src, _ in nx.find_cycle(graph)]
        text = " -> ".join([*around, around[0]])
        raise InputError(f"{where}: edges", text, "the graph has a cycle") from error
