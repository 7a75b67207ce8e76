"""The least makespan of tasks on devices, as a mixed-integer program (HiGHS).

Variables: x[o, d], whether task o is on device d; s[o], its start; z[e, a, b], whether edge e goes
from device a to device b, which the x of its ends imply; p[i, j], whether i runs before j, for
every pair that no path orders and that may share a device; and the makespan C. Rows:

- every task is on one legal device; sums of z over one end are the x of the other;
- s[j] >= s[i] + time[i] + transfer over each edge (i, j); C >= s[o] + time[o] + the shortest time
  of what follows o;
- of a pair on one device the second starts after the first has ended (big M: the latest end of the
  first less the earliest start of the second);
- C is at least the load of each device, which is what makes the relaxation tight.

Devices that nothing tells apart are used in their order, so that placements which differ only by
exchanging them are looked at once. Rows: pairs x devices, so that it is for tens of tasks.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
from scipy.optimize import Bounds, LinearConstraint, OptimizeResult, milp
from scipy.sparse import coo_array

from rlplace.cost.given.event_loop import EventArrays, Floats, Ints
from rlplace.planners.given.alike import alike_before

Bools = npt.NDArray[np.bool_]

#: Rows of pairs beyond which HiGHS finds nothing in reasonable time, nor looks at the clock.
MOST_ROWS = 40_000
_ROUNDING = 1e-9


@dataclass(frozen=True)
class Tasks:
    """What is scheduled. V tasks in topological order, E edges, D devices.

    Args:
        times: Time on each device, infinite where it may not run (V, D).
        sources: Task that each edge leaves (E,).
        targets: Task that it enters (E,).
        transfers: Time from device to device (E, D, D); 0 on the diagonal.
        alike: For each device the one before it that nothing tells apart from it.
    """

    times: Floats
    sources: Ints
    targets: Ints
    transfers: Floats
    alike: tuple[int | None, ...]

    @cached_property
    def legal(self) -> Bools:
        """Whether a task may run on a device (V, D)."""
        return np.isfinite(self.times)

    @cached_property
    def paths(self) -> Bools:
        """Whether a path leads from one task to another (V, V)."""
        found = np.zeros((len(self.times),) * 2, bool)
        for edge in np.argsort(-self.sources, kind="stable"):
            source, target = self.sources[edge], self.targets[edge]
            found[source] |= found[target]
            found[source, target] = True
        return found

    @cached_property
    def heads(self) -> Floats:
        """The earliest start of each task: all before it at its fastest, transfers free (V,)."""
        found, fastest = np.zeros(len(self.times)), self.times.min(axis=1)
        for edge in np.argsort(self.sources, kind="stable"):
            source, target = self.sources[edge], self.targets[edge]
            found[target] = max(found[target], found[source] + fastest[source])
        return found

    @cached_property
    def tails(self) -> Floats:
        """What runs after each task at least, itself left out (V,)."""
        found, fastest = np.zeros(len(self.times)), self.times.min(axis=1)
        for edge in np.argsort(-self.sources, kind="stable"):
            source, target = self.sources[edge], self.targets[edge]
            found[source] = max(found[source], found[target] + fastest[target])
        return found

    @cached_property
    def pairs(self) -> Ints:
        """Pairs that no path orders and that may share a device (P, 2)."""
        free = ~(self.paths | self.paths.T) & (self.legal @ self.legal.T)
        return np.argwhere(np.triu(free, 1))

    @property
    def rows(self) -> int:
        """Rows of the program that are of pairs."""
        return 2 * len(self.pairs) * int(self.times.shape[1])


@dataclass(frozen=True)
class Schedule:
    """What the program says.

    Args:
        placement: Device of each task (V,); None where nothing was found below the cutoff.
        start: Start of each task (V,).
        makespan: End of the last; infinite without a placement.
        bound: No schedule ends before; the cutoff where nothing can be below that.
        nodes: Nodes of the search.
    """

    placement: Ints | None
    start: Floats
    makespan: float
    bound: float
    nodes: int


def tasks_of(arrays: EventArrays) -> Tasks:
    """The ops of an instance of the event forms, each as a task."""
    sizes = arrays.sizes[0][:, None, None]
    return Tasks(
        times=arrays.times,
        sources=np.repeat(np.arange(arrays.ops), np.diff(arrays.first)),
        targets=arrays.readers[0],
        transfers=arrays.delays + sizes * arrays.rates,
        alike=tuple(alike_before(arrays)),
    )


def greedy_makespan(tasks: Tasks) -> float:
    """End of the schedule that puts each task, in its order, on the device where it ends first."""
    free = np.zeros(tasks.times.shape[1])
    ends, on = np.zeros(len(tasks.times)), np.zeros(len(tasks.times), np.int64)
    for task in range(len(tasks.times)):
        ready = free
        for edge in np.flatnonzero(tasks.targets == task):
            source = tasks.sources[edge]
            ready = np.maximum(ready, ends[source] + tasks.transfers[edge, on[source]])
        done = ready + tasks.times[task]
        on[task] = int(np.argmin(done))
        ends[task] = free[on[task]] = done[on[task]]
    return float(ends.max())


def least_makespan(
    tasks: Tasks, cutoff: float, seconds: float = np.inf, nodes: int = 1_000_000_000
) -> Schedule:
    """The best schedule that ends no later than a cutoff.

    Args:
        tasks: What is scheduled.
        cutoff: The makespan of a schedule that is known.
        seconds: Time limit of HiGHS; the best that it has then is the answer.
        nodes: Limit of its search.
    """
    program = _Program(tasks, cutoff)
    found = program.solve(seconds, nodes)
    count = int(found.mip_node_count or 0)
    bound = float(found.mip_dual_bound) if found.mip_dual_bound is not None else 0.0
    if found.x is None:
        return Schedule(None, np.zeros(0), np.inf, cutoff if found.status == 2 else bound, count)
    x = found.x[: tasks.times.size].reshape(tasks.times.shape)
    start = found.x[program.starts : program.starts + len(tasks.times)]
    return Schedule(x.argmax(axis=1), start, float(found.fun), bound, count)


class _Program:
    """Variables in the order x, s, z, p, C; rows as (coefficients, least right side)."""

    def __init__(self, tasks: Tasks, cutoff: float) -> None:
        self.tasks, self.cutoff = tasks, cutoff * (1.0 + _ROUNDING)
        ops, devices = tasks.times.shape
        edges, pairs = len(tasks.sources), len(tasks.pairs)
        self.x = np.arange(ops * devices).reshape(ops, devices)
        self.starts = self.x.size
        self.z = self.starts + ops + np.arange(edges * devices**2).reshape(edges, devices, devices)
        self.p = self.starts + ops + self.z.size + np.arange(pairs)
        self.end = self.starts + ops + self.z.size + pairs
        self._entries: list[tuple[Ints, Ints, Floats]] = []
        self._least: list[Floats] = []
        self._most: list[Floats] = []
        self._rows = 0
        self._place()
        self._follow()
        self._keep_apart()

    def solve(self, seconds: float, nodes: int) -> OptimizeResult:
        """Run HiGHS."""
        rows, columns, values = (np.concatenate(part) for part in zip(*self._entries, strict=True))
        matrix = coo_array((values, (rows, columns)), (self._rows, self.end + 1)).tocsr()
        limits = LinearConstraint(matrix, np.concatenate(self._least), np.concatenate(self._most))
        goal = np.zeros(self.end + 1)
        goal[self.end] = 1.0
        whole = np.zeros(self.end + 1)
        whole[self.x] = whole[self.p] = 1.0
        return milp(
            goal,
            constraints=limits,
            bounds=self._bounds(),
            integrality=whole,
            options={"time_limit": seconds, "node_limit": nodes},
        )

    def _bounds(self) -> Bounds:
        tasks = self.tasks
        low, high = np.zeros(self.end + 1), np.ones(self.end + 1)
        starts = slice(self.starts, self.starts + len(tasks.times))
        low[starts] = tasks.heads
        high[starts] = np.maximum(self.cutoff - tasks.tails - tasks.times.min(axis=1), tasks.heads)
        high[self.x[~tasks.legal]] = 0.0
        for device, before in enumerate(tasks.alike):
            # As many devices before it that are alike, as many tasks before it can use it.
            rank = 0
            while before is not None:
                rank, before = rank + 1, tasks.alike[before]
            high[self.x[:rank, device]] = 0.0
        high[self.end] = self.cutoff
        return Bounds(low, high)

    def _add(
        self, parts: list[tuple[Ints, Floats]], least: Floats, most: Floats | float = np.inf
    ) -> None:
        """Rows: each part gives a column and a coefficient of every row, (R,) or (R, K) each."""
        count = len(least)
        for columns, values in parts:
            shape = np.broadcast_shapes(columns.shape, values.shape)
            row = np.broadcast_to(
                self._rows + np.arange(count).reshape(-1, *[1] * (len(shape) - 1)), shape
            )
            self._entries.append(
                (
                    row.ravel(),
                    np.broadcast_to(columns, shape).ravel(),
                    np.broadcast_to(values, shape).ravel(),
                )
            )
        self._least.append(least)
        self._most.append(np.broadcast_to(most, count))
        self._rows += count

    def _place(self) -> None:
        tasks, one = self.tasks, np.ones(1)
        ops, devices = tasks.times.shape
        edges = len(tasks.sources)
        self._add([(self.x, one[:, None])], np.ones(ops), 1.0)
        for ends, z in ((tasks.sources, self.z), (tasks.targets, self.z.transpose(0, 2, 1))):
            self._add(
                [
                    (z.reshape(-1, devices), one[:, None]),
                    (self.x[ends].ravel(), -one),
                ],
                np.zeros(edges * devices),
                0.0,
            )

    def _follow(self) -> None:
        tasks, one = self.tasks, np.ones(1)
        ops, devices = tasks.times.shape
        edges, op = len(tasks.sources), np.arange(ops)
        shape = (edges, devices**2)
        times = np.where(tasks.legal, tasks.times, 0.0)
        self._add(
            [
                (self.starts + tasks.targets, one),
                (self.starts + tasks.sources, -one),
                (self.x[tasks.sources], -times[tasks.sources]),
                (self.z.reshape(shape), -tasks.transfers.reshape(shape)),
            ],
            np.zeros(edges),
        )
        end = np.array([self.end])
        self._add([(end, np.ones(ops)), (self.starts + op, -one), (self.x, -times)], tasks.tails)
        self._add([(end, np.ones(devices)), (self.x.T, -times.T)], np.zeros(devices))

    def _keep_apart(self) -> None:
        """The second of a pair on one device starts after the end of the first."""
        tasks, one = self.tasks, np.ones(1)
        times = np.where(tasks.legal, tasks.times, 0.0)
        first, second = tasks.pairs.T
        for i, j, before in ((first, second, 1.0), (second, first, -1.0)):
            # s[j] >= s[i] + time[i] - M (2 - x[i, d] - x[j, d]) - M (1 - [i before j]).
            room = np.maximum(self.cutoff - tasks.tails[i] - tasks.heads[j], 0.0)
            for device in range(times.shape[1]):
                self._add(
                    [
                        (self.starts + j, one),
                        (self.starts + i, -one),
                        (self.x[i], -times[i]),
                        (self.x[i, device], -room),
                        (self.x[j, device], -room),
                        (self.p, -before * room),
                    ],
                    -room * (3.0 if before > 0.0 else 2.0),
                )
