"""Compute graphs of DOPPLER, as text (as published) or JSON.

Yao et al., "DOPPLER: Dual-Policy Learning for Device Assignment in Asynchronous Dataflow Graphs",
ICLR 2026. The text has a line with the number of nodes, inputs included; a line with the positions
of the inputs, which are no nodes of the graph; a line each of edge sources and edge targets; then
a line ``compute,transfer[,type]`` for each node that is left. The published simulator divides its
result by 1e10, and so does this reader every cost: times can be compared with published ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel

from rlplace.errors import InputError
from rlplace.graph.formats.parse import Amount, FileEdge, assemble, parse, same_length
from rlplace.graph.formats.types import EventCosts, GivenInstance

#: What the published simulator divides its times by.
DIVISOR = 1e10
_HEADER_LINES = 4


class _File(BaseModel):
    comp: list[Amount]
    comm: list[Amount]
    edges: list[tuple[int, int]]
    node_type: list[str] | None = None
    default_devices: int | None = None


def is_doppler(data: Any) -> bool:
    """Whether JSON data is of this format."""
    return isinstance(data, dict) and {"comp", "comm", "edges"} <= data.keys()


def is_doppler_text(text: str) -> bool:
    """Whether a text begins with a number of nodes and three lists of integers."""
    lines = text.splitlines()[:_HEADER_LINES]
    return (
        len(lines) == _HEADER_LINES
        and lines[0].strip().isdigit()
        and all(part.strip().isdigit() for line in lines[1:] for part in _parts(line))
    )


def read_doppler_text(text: str, name: str, devices: int | None = None) -> GivenInstance:
    """An instance from the published text.

    Args:
        text: Content of the file.
        name: Name of the instance.
        devices: Number of devices, which the text does not say.

    Raises:
        InputError: As `read_doppler`, and on a line that is missing or no list of integers.
    """
    lines = text.splitlines()
    if not is_doppler_text(text):
        rule = "must begin with the number of nodes, the inputs, edge sources and edge targets"
        raise InputError(name, lines[:1], rule)
    inputs, sources, targets = ([int(part) for part in _parts(line)] for line in lines[1:4])
    same_length(name, len(sources), targets=targets)
    rows = [_parts(line) for line in lines[_HEADER_LINES:] if line.strip()]
    same_length(name, int(lines[0]) - len(inputs), nodes=rows)
    for position, row in enumerate(rows):
        if len(row) < 2 or not (row[0].strip().isdigit() and row[1].strip().isdigit()):
            raise InputError(f"{name}: node {position}", ",".join(row), "must be compute,transfer")
    typed = [row[2].strip() for row in rows if len(row) > 2]
    data = {
        "comp": [int(row[0]) for row in rows],
        "comm": [int(row[1]) for row in rows],
        "edges": list(zip(sources, targets, strict=True)),
        "node_type": typed if len(typed) == len(rows) else None,
    }
    return read_doppler(data, name, devices)


def read_doppler(data: Any, name: str, devices: int | None = None) -> GivenInstance:
    """An instance from JSON data: ``comp`` and ``comm`` by node, ``edges`` as pairs.

    Args:
        data: Content of the file.
        name: Name of the instance.
        devices: Number of equal devices; by default ``default_devices`` of the file.

    Raises:
        InputError: On a field that is missing or wrong, an unknown node, a cycle, or if neither the
            file nor the caller says how many devices there are.
    """
    file = parse(_File, data, name)
    same_length(name, len(file.comp), comm=file.comm, node_type=file.node_type or file.comp)
    number = devices if devices is not None else file.default_devices
    if number is None or number < 1:
        rule = "the file does not say how many devices there are; give at least 1"
        raise InputError("devices", number, rule, 4)
    kinds = file.node_type or ["op"] * len(file.comp)
    edges = [FileEdge(src, dst) for src, dst in file.edges]
    labels = [f"{kind}{position}" for position, kind in enumerate(kinds)]
    made = assemble(name, labels, edges, list(zip(kinds, file.comp, file.comm, strict=True)))
    costs = EventCosts(
        compute=tuple(file.comp[position] / DIVISOR for position in made.positions),
        sizes=tuple(file.comm[edge.src] / DIVISOR for edge in edges),
        rates=(1.0,) * number,
        delays=((0.0,) * number,) * number,
        transfer_rates=_equal_links(number),
        legal=(tuple(range(number)),) * len(file.comp),
    )
    return GivenInstance(name, "doppler", made.graph, costs, made.positions)


def _equal_links(devices: int) -> tuple[tuple[float, ...], ...]:
    return tuple(tuple(float(i != j) for j in range(devices)) for i in range(devices))


def _parts(line: str) -> Sequence[str]:
    return [part for part in line.split(",") if part.strip()]
