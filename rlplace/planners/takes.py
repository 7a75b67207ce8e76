"""Which devices a stage may take of those that are left: the graph that a program walks.

Devices stand in lines, one for each island (`Cluster.islands`); a *state* is how many of each line
are left, and a *take* removes a run from the end of one line or of several. So stages on devices of
different kinds may follow one another in any order, and equal devices are not told apart. Where
there would be too many states, all devices stand in one line, in each of a few orders of islands.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import prod
from typing import Self

import numpy as np
import numpy.typing as npt

from rlplace.plan.types import Instance, Mesh
from rlplace.planners.meshes import device_orders, mesh_shapes, runs, small
from rlplace.planners.stage_solver import StageSolver

Ints = npt.NDArray[np.int64]
#: Devices that are left of each line.
State = tuple[int, ...]
Lines = tuple[tuple[int, ...], ...]

#: More states or takes than this are too many.
_STATES, _TAKES = 1_500, 12_000


@dataclass(frozen=True)
class Takes:
    """All takes of all states that can be reached. E takes, L lines.

    Args:
        lines: Devices of each line.
        states: What is left in each state; the first is the whole cluster.
        meshes: The mesh that each take makes.
        before, after: State before and after each take, (E,).
        entry: The line of the first device of each mesh, (E,).
    """

    lines: Lines
    states: tuple[State, ...]
    meshes: tuple[Mesh, ...]
    before: Ints
    after: Ints
    entry: Ints

    def of(self, wanted: npt.NDArray[np.bool_]) -> Self:
        """Some of the takes (E,), of the same states."""
        kept = np.flatnonzero(wanted)
        return replace(
            self,
            meshes=tuple(self.meshes[take] for take in kept),
            before=self.before[kept],
            after=self.after[kept],
            entry=self.entry[kept],
        )


def all_takes(solver: StageSolver) -> Iterator[Takes]:
    """The takes of a cluster with a line for each island, or for each order of islands."""
    instance = solver.instance
    islands = instance.cluster.islands
    found = _takes(solver, islands) if _few(instance, islands) else None
    if found is not None:
        yield found
        return
    for order in device_orders(instance):
        one = _takes(solver, (order,), limited=False)
        assert one is not None
        yield one


def _few(instance: Instance, lines: Lines) -> bool:
    positions = [{start for start, _ in runs(instance, line)} for line in lines]
    return prod(len(own) + 1 for own in positions) <= _STATES


def _takes(solver: StageSolver, lines: Lines, limited: bool = True) -> Takes | None:
    """None where there are too many."""
    instance = solver.instance
    starts: list[dict[int, list[int]]] = []
    for line in lines:
        own: dict[int, list[int]] = {}
        for start, stop in runs(instance, line):
            own.setdefault(stop, []).append(start)
        starts.append(own)
    shapes: dict[tuple[int, ...], list[Mesh]] = {}
    states: list[State] = [tuple(len(line) for line in lines)]
    numbers = {states[0]: 0}
    rows: list[tuple[int, int, int]] = []
    meshes: list[Mesh] = []
    for number, state in enumerate(states):  # it grows meanwhile
        ways = [[left, *own.get(left, ())] for left, own in zip(state, starts, strict=True)]
        for after in product(*ways):
            parts = [(i, a, b) for i, (a, b) in enumerate(zip(after, state, strict=True)) if a < b]
            if not parts or not (small(instance) or _even(parts, lines)):
                continue
            devices = tuple(d for i, a, b in parts for d in lines[i][a:b])
            if devices not in shapes:
                offered = mesh_shapes(instance, devices, instance.global_batch, uneven=True)
                shapes[devices] = [mesh for mesh in offered if solver.usable(mesh)]
            if shapes[devices] and after not in numbers:
                numbers[after] = len(states)
                states.append(after)
            for mesh in shapes[devices]:
                rows.append((number, numbers[after], parts[0][0]))
                meshes.append(mesh)
        if limited and len(rows) > _TAKES:
            return None
    columns = np.array(rows, np.int64).reshape(-1, 3).T
    return Takes(lines, tuple(states), tuple(meshes), *np.ascontiguousarray(columns))


def _even(parts: Sequence[tuple[int, int, int]], lines: Lines) -> bool:
    """Whether a take of several lines is as wide in each, or takes them all whole."""
    wide = {b - a for _, a, b in parts}
    return len(wide) == 1 or all((a, b) == (0, len(lines[i])) for i, a, b in parts)
