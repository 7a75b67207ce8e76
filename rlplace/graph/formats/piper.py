"""JSON of msr-fiddle/piper.

Tarnawski et al., "Piper: Multidimensional Planner for DNN Parallelization", NeurIPS 2021.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from rlplace.errors import InputError
from rlplace.graph.formats.parse import (
    Amount,
    FileEdge,
    Positive,
    assemble,
    find,
    parse,
    positions_of,
)
from rlplace.graph.formats.types import GivenInstance, PiperCosts, Variant


class _Variant(BaseModel):
    id: str
    timePerSample: Amount
    parameterSize: Amount
    memoryUsageA: Amount
    memoryUsageB: Amount
    syncTimeFw: dict[int, Amount]
    syncTimeBw: dict[int, Amount]


class _Node(BaseModel):
    id: int
    TMPCs: dict[int, list[_Variant]]
    name: str = ""


class _Edge(BaseModel):
    sourceId: int
    destId: int
    communicationCost: Amount


class _File(BaseModel):
    maxDevices: int
    maxMemoryPerDevice: Positive
    bandwidth: Positive
    mbsInBatch: int
    nodes: list[_Node]
    edges: list[_Edge]


def is_piper(data: Any) -> bool:
    """Whether JSON data is of this format."""
    return isinstance(data, dict) and "nodes" in data and "maxMemoryPerDevice" in data


def read_piper(data: Any, name: str) -> GivenInstance:
    """An instance from JSON data.

    Args:
        data: Content of the file.
        name: Name of the instance.

    Raises:
        InputError: On a field that is missing or wrong, an unknown or repeated node, a cycle, or a
            variant that leaves out an edge of its node.
    """
    file = parse(_File, data, name)
    for field, count in (("maxDevices", file.maxDevices), ("mbsInBatch", file.mbsInBatch)):
        if count < 1:
            raise InputError(f"{name}: {field}", count, "must be at least 1", 1)
    place = positions_of([node.id for node in file.nodes], name)
    edges = [
        FileEdge(find(place, e.sourceId, name), find(place, e.destId, name), e.communicationCost)
        for e in file.edges
    ]
    _check_variants(file, name)
    labels = [node.name or str(node.id) for node in file.nodes]
    made = assemble(name, labels, edges, [repr(node.TMPCs) for node in file.nodes])
    groups = {node: made.groups[position] for node, position in place.items()}
    costs = PiperCosts(
        variants=tuple(_variants(file.nodes[position], groups) for position in made.positions),
        edge_bytes=tuple(edge.bytes for edge in edges),
        bandwidth=file.bandwidth,
        devices=file.maxDevices,
        memory_cap=file.maxMemoryPerDevice,
        micro_batches=file.mbsInBatch,
    )
    return GivenInstance(name, "piper", made.graph, costs, made.positions)


def _check_variants(file: _File, name: str) -> None:
    """Each variant of a node has to name all its edges, and no others."""
    sources: dict[int, set[int]] = {node.id: set() for node in file.nodes}
    targets: dict[int, set[int]] = {node.id: set() for node in file.nodes}
    for edge in file.edges:
        sources[edge.destId].add(edge.sourceId)
        targets[edge.sourceId].add(edge.destId)
    for node in file.nodes:
        for degree, variants in node.TMPCs.items():
            where = f"{name}: node {node.id}: TMPCs.{degree}"
            names = [variant.id for variant in variants]
            if degree < 1 or len(set(names)) < len(names):
                rule = "a degree is at least 1 and its variants have different ids"
                raise InputError(where, names, rule)
            for variant in variants:
                _check_edges(f"{where}: syncTimeFw", set(variant.syncTimeFw), sources[node.id])
                _check_edges(f"{where}: syncTimeBw", set(variant.syncTimeBw), targets[node.id])


def _check_edges(where: str, named: set[int], expected: set[int]) -> None:
    if named != expected:
        rule = "must name exactly the other ends of the node's edges"
        raise InputError(where, sorted(named), rule, sorted(expected))


def _variants(node: _Node, groups: dict[int, int]) -> tuple[Variant, ...]:
    return tuple(
        Variant(
            degree=degree,
            name=variant.id,
            time=variant.timePerSample,
            params=variant.parameterSize,
            memory_each=variant.memoryUsageA,
            memory_fixed=variant.memoryUsageB,
            sync_in=tuple((groups[n], value) for n, value in variant.syncTimeFw.items()),
            sync_out=tuple((groups[n], value) for n, value in variant.syncTimeBw.items()),
        )
        for degree, variants in sorted(node.TMPCs.items())
        for variant in variants
    )
