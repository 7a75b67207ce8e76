"""Instances of GiPH: a file holds device networks and programs, and each pair is an instance.

Hu et al., "GiPH: Generalizable Placement Learning for Adaptive Heterogeneous Computing", MLSys
2023. The generator of uidmice/placement-rl keeps them as pickled tensors; this is the same content
as JSON: ``networks`` with ``comp_rate``, ``comm_delay``, ``comm_rate`` and ``device_constraints``
(the op types that each device can run), ``programs`` with ``compute``, ``type`` and ``edges`` as
``[source, target, bytes]``.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from rlplace.errors import InputError
from rlplace.graph.formats.parse import Amount, FileEdge, assemble, parse, same_length
from rlplace.graph.formats.types import EventCosts, GivenInstance


class _Network(BaseModel):
    comp_rate: list[Amount]
    comm_delay: list[list[Amount]]
    comm_rate: list[list[Amount]]
    device_constraints: dict[int, list[int]]


class _Program(BaseModel):
    compute: list[Amount]
    type: list[int]
    edges: list[tuple[int, int, Amount]]


def is_giph(data: Any) -> bool:
    """Whether JSON data is of this format."""
    return isinstance(data, dict) and all(
        isinstance(data.get(field), list) for field in ("networks", "programs")
    )


def giph_names(data: Any) -> list[str]:
    """Names of the instances of a file: ``network/program``, counted from 0."""
    networks, programs = len(data["networks"]), len(data["programs"])
    return [f"{n}/{p}" for n in range(networks) for p in range(programs)]


def read_giph(data: Any, name: str) -> GivenInstance:
    """One instance of a file.

    Args:
        data: Content of the file.
        name: One of `giph_names`.

    Raises:
        InputError: On a field that is missing or wrong, an unknown node, a cycle, or an op that no
            device may run.
    """
    if name not in giph_names(data):
        raise InputError("name", name, "no instance has this name", "network/program, as 0/3")
    first, second = (int(part) for part in name.split("/"))
    network = parse(_Network, data["networks"][first], f"networks.{first}")
    program = parse(_Program, data["programs"][second], f"programs.{second}")
    _check_network(network, f"networks.{first}")
    where = f"programs.{second}"
    same_length(where, len(program.compute), type=program.type)
    edges = [FileEdge(src, dst, size) for src, dst, size in program.edges]
    labels = [f"op{position}" for position in range(len(program.compute))]
    per_node = list(zip(program.compute, program.type, strict=True))
    made = assemble(where, labels, edges, per_node)
    devices = range(len(network.comp_rate))
    legal = tuple(
        tuple(d for d in devices if program.type[position] in network.device_constraints[d])
        for position in made.positions
    )
    for group, choices in enumerate(legal):
        if not choices:
            kind = program.type[made.positions[group]]
            raise InputError(f"{where}: type", kind, f"no device of networks.{first} may run it")
    costs = EventCosts(
        compute=tuple(program.compute[position] for position in made.positions),
        sizes=tuple(edge.bytes for edge in edges),
        rates=tuple(network.comp_rate),
        delays=tuple(map(tuple, network.comm_delay)),
        transfer_rates=tuple(map(tuple, network.comm_rate)),
        legal=legal,
    )
    return GivenInstance(name, "giph", made.graph, costs, made.positions)


def _check_network(network: _Network, where: str) -> None:
    """Square matrices, and constraints for each device."""
    devices = len(network.comp_rate)
    for field in ("comm_delay", "comm_rate"):
        rows: list[list[float]] = getattr(network, field)
        if any(len(row) != devices for row in rows) or len(rows) != devices:
            lengths = [len(row) for row in rows]
            rule = f"must have {devices} rows of {devices} entries, as comp_rate has {devices}"
            raise InputError(f"{where}: row lengths of {field}", lengths, rule)
    if sorted(network.device_constraints) != list(range(devices)):
        rule = f"must name the devices 0 to {devices - 1}"
        raise InputError(f"{where}: device_constraints", sorted(network.device_constraints), rule)
