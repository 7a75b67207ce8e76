"""A dnn-partitioning instance as its planners see it: units, nets, and the order of the units.

Exact reductions: ops of one color class are one unit. An op and its consumers are a net; every
accelerator that a net touches pays the transfer of the op as soon as the net touches two devices,
so nets of the same units are one. Contiguity is of the forward graph: units that lie on a cycle
are one part, and a unit of backward ops only takes its place from the mirror image of its
backward edges (Tarnawski et al., NeurIPS 2020, section 5.3).
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Literal

import networkx as nx
import numpy as np
import numpy.typing as npt

from rlplace.cost.given.common import costs_of
from rlplace.cost.given.loads import color_of
from rlplace.graph.formats.types import GivenInstance, LoadCosts

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

#: Which units without time join a neighbour, where memory binds: those without bytes (nothing is
#: lost), all, or all and without their bytes (a relaxation, which bounds the optimum).
Merging = Literal["exact", "all", "weightless"]


@dataclass(frozen=True)
class Units:
    """Units and nets. U units, N nets.

    Args:
        unit_of: Unit of each op.
        cpu: Time of each unit on a CPU, (U,).
        accelerator: Time of each unit on an accelerator, infinite where it may not run, (U,).
        memory: Bytes on an accelerator, (U,).
        nets: The units of each net, two or more.
        prices: What each accelerator that a cut net touches pays, (N,).
        before: The units that come right before each unit in the forward graph.
    """

    unit_of: tuple[int, ...]
    cpu: Floats
    accelerator: Floats
    memory: Floats
    nets: tuple[tuple[int, ...], ...]
    prices: Floats
    before: tuple[frozenset[int], ...]

    def __len__(self) -> int:
        return len(self.memory)

    def placement(self, device_of: Sequence[int] | Ints) -> tuple[int, ...]:
        """Device of each op from that of each unit."""
        return tuple(int(device_of[unit]) for unit in self.unit_of)

    @cached_property
    def nets_of(self) -> tuple[tuple[int, ...], ...]:
        """The nets of each unit."""
        found: list[list[int]] = [[] for _ in range(len(self))]
        for net, pins in enumerate(self.nets):
            for unit in pins:
                found[unit].append(net)
        return tuple(tuple(nets) for nets in found)

    @cached_property
    def after(self) -> tuple[frozenset[int], ...]:
        """The units that come right after each unit in the forward graph."""
        found: list[set[int]] = [set() for _ in range(len(self))]
        for unit, earlier in enumerate(self.before):
            for other in earlier:
                found[other].add(unit)
        return tuple(frozenset(units) for units in found)

    @cached_property
    def in_line(self) -> Units:
        """The same with one topological order as the only one."""
        graph = nx.DiGraph()
        graph.add_nodes_from(range(len(self)))
        graph.add_edges_from((u, v) for v, before in enumerate(self.before) for u in before)
        order = list(nx.lexicographical_topological_sort(graph))
        before: list[frozenset[int]] = [frozenset()] * len(self)
        for earlier, later in pairwise(order):
            before[later] = frozenset({earlier})
        return replace(self, before=tuple(before))


def ragged(rows: Sequence[Sequence[int]]) -> tuple[Ints, Ints]:
    """Rows of different lengths as arrays: where each begins, and all one after the other."""
    first = np.concatenate([[0], np.cumsum([len(row) for row in rows])]).astype(np.int64)
    return first, np.array([value for row in rows for value in row], np.int64)


def color_units(instance: GivenInstance) -> Units:
    """One unit a color class: what any placement may tell apart."""
    costs = costs_of(instance, LoadCosts)
    colors = [color_of(costs, op) for op in range(len(costs.colors))]
    keys = [("op", op) if color is None else ("class", color) for op, color in enumerate(colors)]
    return _build(instance, costs, _numbered(keys), costs.memory)


def contiguous_units(instance: GivenInstance, merging: Merging = "exact") -> Units:
    """The units of contiguous placements: color classes, merged where that loses nothing.

    Args:
        instance: The instance.
        merging: Which units without time join a neighbour where memory binds.
    """
    costs = costs_of(instance, LoadCosts)
    any_bytes = merging != "exact" or sum(costs.memory) <= costs.memory_cap
    units, memory = color_units(instance), list(costs.memory)
    while True:
        home = _components(units)
        if len(set(home)) == len(units):
            home = _merged(units, any_bytes)
            if merging == "weightless":
                for op, unit in enumerate(units.unit_of):
                    memory[op] *= home[unit] == unit
        if len(set(home)) == len(units):
            return units
        units = _build(instance, costs, _numbered([home[u] for u in units.unit_of]), memory)


def _numbered(keys: Sequence[Hashable]) -> tuple[int, ...]:
    numbers: dict[Hashable, int] = {}
    return tuple(numbers.setdefault(key, len(numbers)) for key in keys)


def _build(
    instance: GivenInstance, costs: LoadCosts, unit_of: tuple[int, ...], memory: Sequence[float]
) -> Units:
    count = max(unit_of) + 1

    def total(values: Sequence[float] | Floats) -> Floats:
        found = np.zeros(count)
        np.add.at(found, np.array(unit_of), np.asarray(values, float))
        return found

    barred = np.where(costs.on_accelerator, 0.0, np.inf)
    pins = [{unit} for unit in unit_of]
    for edge in instance.graph.edges:
        pins[edge.src].add(unit_of[edge.dst])
    prices: dict[tuple[int, ...], float] = {}
    for op, units in enumerate(pins):
        if len(units) > 1 and costs.transfers[op] > 0.0:
            net = tuple(sorted(units))
            prices[net] = prices.get(net, 0.0) + costs.transfers[op]
    return Units(
        unit_of=unit_of,
        cpu=total(costs.cpu_times),
        accelerator=total(np.array(costs.accelerator_times) + barred),
        memory=total(memory),
        nets=tuple(prices),
        prices=np.array(list(prices.values())),
        before=_order(instance, costs, unit_of, count),
    )


def _order(
    instance: GivenInstance, costs: LoadCosts, unit_of: tuple[int, ...], count: int
) -> tuple[frozenset[int], ...]:
    """Edges of the forward graph, and mirrored ones for units without a forward op."""
    forward = {unit for op, unit in enumerate(unit_of) if not costs.backward[op]}
    before: list[set[int]] = [set() for _ in range(count)]
    for edge in instance.graph.edges:
        src, dst = unit_of[edge.src], unit_of[edge.dst]
        ends = costs.backward[edge.src], costs.backward[edge.dst]
        if src == dst:
            continue
        if not any(ends):
            before[dst].add(src)
        elif all(ends) and not {src, dst} <= forward:
            before[src].add(dst)
    return tuple(frozenset(units) for units in before)


def _components(units: Units) -> list[int]:
    """The first unit of the cycle that each unit lies on; itself where it lies on none."""
    graph = nx.DiGraph()
    graph.add_nodes_from(range(len(units)))
    graph.add_edges_from((u, unit) for unit, before in enumerate(units.before) for u in before)
    home = list(range(len(units)))
    for component in nx.strongly_connected_components(graph):
        for unit in component:
            home[unit] = min(component)
    return home


def _merged(units: Units, any_bytes: bool) -> list[int]:
    """The neighbour that each unit joins, or itself; no unit joins one that moves itself."""
    home = list(range(len(units)))
    touched: set[int] = set()
    for unit in range(len(units)):
        idle = units.cpu[unit] == 0.0 == units.accelerator[unit]
        if unit in touched or not idle or (units.memory[unit] > 0.0 and not any_bytes):
            continue
        for neighbours in (units.before[unit], units.after[unit]):
            if len(neighbours) == 1:
                (other,) = neighbours
                if other not in touched and _free(units, unit, other):
                    home[unit] = other
                    touched |= {unit, other, *units.before[unit], *units.after[unit]}
                    break
    return home


def _free(units: Units, unit: int, other: int) -> bool:
    """Whether nobody pays more if a unit without time joins the other's device.

    So it is if the other is in each of its nets: a device that pays then has paid before.
    """
    return all(other in units.nets[net] for net in units.nets_of[unit])
