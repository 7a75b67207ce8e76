"""Solved stages of an instance by `layout_program`, and the ways to cut borders inside a stage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from rlplace.graph.types import OpGraph, Replicate
from rlplace.plan.types import GroupChoice, Mesh
from rlplace.planners.costing import Costing
from rlplace.planners.layout_program import GAP, LayoutProgram
from rlplace.planners.mesh_options import MeshOptions, MeshTables
from rlplace.simulate.stages import tied_states

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

#: Ways to cut the borders of a stage that are looked at, and steps of looking for them.
_WAYS, _STEPS = 16, 20_000


class Meeting(NamedTuple):
    """Where two groups agree: on a tensor between them, or on a parameter that both use.

    Args:
        before, after: The groups.
        given, taken: The place of it among what either hands on, reads or holds.
        what: Whether it is a tensor.
    """

    before: int
    after: int
    given: int
    taken: int
    what: Literal["tensor", "parameter"]


def meetings(graph: OpGraph) -> tuple[Meeting, ...]:
    """All edges, and neighbours among the groups that share a parameter."""
    found, read = [], [0] * len(graph.groups)
    for edge in graph.edges:
        names = graph.groups[edge.src].writes
        place = names.index(edge.tensor) if edge.tensor in names else 0
        found.append(Meeting(edge.src, edge.dst, place, read[edge.dst], "tensor"))
        read[edge.dst] += 1
    for name, _ in graph.tied:
        own = [group for group in graph.groups if name in group.params]
        for before, after in pairwise(own):
            places = before.params.index(name), after.params.index(name)
            found.append(Meeting(before.index, after.index, *places, "parameter"))
    return tuple(found)


class _Pair(NamedTuple):
    """A meeting, and what each option of either group says there, as a number, (S,)."""

    meeting: Meeting
    given: Ints
    taken: Ints


@dataclass
class LayoutTables:
    """Solved stages: equal ones are solved once.

    Args:
        costing: Of the instance.
        seconds: How long one program may take.
    """

    costing: Costing
    seconds: float = float("inf")
    _pairs: dict[tuple[int, int], tuple[_Pair, ...]] = field(default_factory=dict)
    #: Options of a stage by micro-batches in flight; 0 is without a limit of bytes.
    _known: dict[tuple[object, ...], dict[int, Ints | None]] = field(default_factory=dict)
    _ways: dict[tuple[object, ...], tuple[Ints, Ints, Floats]] = field(default_factory=dict)
    _looks: dict[tuple[int, int], int] = field(default_factory=dict)
    _numbers: dict[object, int] = field(default_factory=dict)

    @cached_property
    def tables(self) -> MeshTables:
        """The options, those that cut activations between groups among them."""
        return MeshTables(self.costing, bordered=True)

    def solve(
        self,
        start: int,
        stop: int,
        mesh: Mesh,
        micro_batches: int,
        held: int,
        gap: float = GAP,
        limit: float = float("inf"),
    ) -> tuple[float, tuple[GroupChoice, ...]]:
        """Quickest choices of groups [start, stop).

        Args:
            start: First group.
            stop: One past the last.
            mesh: Where they run.
            micro_batches: Of a step.
            held: Of those, in flight at the peak.
            gap: How far from the best they may be, as a share.
            limit: Seconds of a step below which they are to be.

        Returns:
            Seconds of a step's work, and the choices; infinite and none if there are none.
        """
        asked = self.program(start, stop, mesh, micro_batches, held)
        known = self._known.setdefault((*self._key(start, stop, mesh, micro_batches), gap), {})
        if not known:
            known[0] = replace(asked, room=float("inf")).solve(gap, seconds=self.seconds)
        # What is best with fewer in flight, or without a limit, is so as long as it fits.
        picks = known[max(fewer for fewer in known if fewer <= held)]
        if picks is not None and asked.held(picks) > asked.room:
            picks = asked.solve(gap, limit, self.seconds)
            if picks is not None or np.isinf(limit):
                known[held] = picks
        if picks is None:
            return float("inf"), ()
        options = self.tables.options(mesh, micro_batches)
        rows = zip(options.choices[start:stop], picks, strict=True)
        return asked.value(picks), tuple(row[int(pick)] for row, pick in rows)

    def program(
        self, start: int, stop: int, mesh: Mesh, micro_batches: int, held: int
    ) -> LayoutProgram:
        """The program of a stage."""
        options, own = self.tables.options(mesh, micro_batches), slice(start, stop)
        key = self._key(start, stop, mesh, micro_batches)
        if key not in self._ways:
            found = self._borders(options, start, stop, mesh, micro_batches)
            self._ways[key] = (*found, self._twice(options, start, stop, mesh))
        borders, ways, twice = self._ways[key]
        return LayoutProgram(
            micro_batches * options.work[own] + apart(options)[own],
            options.backward[own],
            options.hides[own],
            options.static[own] - twice + held * options.saved[own],
            options.transient[own],
            borders,
            ways,
            options.limit,
        )

    def least(self, mesh: Mesh, micro_batches: int) -> Floats:
        """Seconds of a step that the groups before each one take at least, (G + 1,)."""
        options = self.tables.options(mesh, micro_batches)
        quickest = (micro_batches * options.work + apart(options)).min(axis=1)
        return np.concatenate([[0.0], np.cumsum(quickest)])

    def _key(self, start: int, stop: int, mesh: Mesh, micro_batches: int) -> tuple[object, ...]:
        """What is equal for stages whose programs are."""
        looks = self.costing.solver.mesh_class(mesh)
        if (start, stop) not in self._looks:
            graph, reads = self.costing.instance.graph, self.costing.solver.reads
            groups = tuple((graph.groups[g].structure, reads[g]) for g in range(start, stop))
            inside = tuple(
                one._replace(before=one.before - start, after=one.after - start)
                for one in self._meetings
                if start <= one.before and one.after < stop
            )
            number = self._numbers.setdefault((groups, inside), len(self._numbers))
            self._looks[start, stop] = number
        return looks, micro_batches, self._looks[start, stop]

    @cached_property
    def _meetings(self) -> tuple[Meeting, ...]:
        return meetings(self.costing.instance.graph)

    def _borders(
        self, options: MeshOptions, start: int, stop: int, mesh: Mesh, micro_batches: int
    ) -> tuple[Ints, Ints]:
        """A number for the borders of each option of a stage, and the ways to cut them."""
        says: list[list[Ints]] = [[] for _ in range(start, stop)]
        inside = []
        for pair in self._all_pairs(options, mesh, micro_batches):
            meeting = pair.meeting
            if start <= meeting.before and meeting.after < stop:
                before, after = meeting.before - start, meeting.after - start
                says[before].append(pair.given)
                says[after].append(pair.taken)
                inside.append((before, after, pair.given, pair.taken))
        borders = np.zeros((stop - start, options.forward.shape[1]), np.int64)
        for group, own in enumerate(says):
            if own:
                borders[group] = np.unique(np.array(own), axis=1, return_inverse=True)[1].ravel()
        count = [len(row) for row in options.choices[start:stop]]
        return borders, find_ways(borders, count, inside)

    def _twice(self, options: MeshOptions, start: int, stop: int, mesh: Mesh) -> Floats:
        """Bytes of each option that a group before it in a stage has too, of tied parameters."""
        instance = self.costing.instance
        found = np.zeros((stop - start, options.forward.shape[1]))
        for tied in instance.graph.tied:
            users = [g for g in instance.graph.groups[start:stop] if tied[0] in g.params]
            for group in users[1:]:
                for place, choice in enumerate(options.choices[group.index]):
                    held = tied_states(instance, group, choice, mesh, tied).total
                    found[group.index - start, place] += held
        return found

    def _all_pairs(self, options: MeshOptions, mesh: Mesh, micro_batches: int) -> tuple[_Pair, ...]:
        """All pairs that could disagree."""
        key = (self.costing.solver.mesh_class(mesh), micro_batches)
        if key not in self._pairs:
            made = (self._pair(options, mesh.tp, one) for one in self._meetings)
            self._pairs[key] = tuple(
                one for one in made if len({*one.given, *one.taken} - {-1}) > 1
            )
        return self._pairs[key]

    def _pair(self, options: MeshOptions, tp: int, meeting: Meeting) -> _Pair:
        graph, known = self.costing.instance.graph, dict[object, int]()
        tensor = meeting.what == "tensor"
        said = []
        for group, place, name in (
            (meeting.before, meeting.given, "writes" if tensor else "params"),
            (meeting.after, meeting.taken, "reads" if tensor else "params"),
        ):
            layouts = {own.name: own for own in graph.structure(group).layouts_with("tp", tp)}
            numbers = np.full(options.forward.shape[1], -1, np.int64)
            for index, choice in enumerate(options.choices[group]):
                places = getattr(layouts[choice.layout], name)
                what = places[place] if places else Replicate()
                numbers[index] = known.setdefault(what, len(known))
            said.append(numbers)
        return _Pair(meeting, *said)


def apart(options: MeshOptions) -> Floats:
    """Seconds once a step without what a group's own backward does not hide of a reduction."""
    with np.errstate(invalid="ignore"):
        waits = np.nan_to_num(np.maximum(options.hides - options.backward, 0.0), posinf=0.0)
    return np.asarray(options.once - np.nan_to_num(waits), np.float64)


def find_ways(
    borders: Ints, options: Sequence[int], pairs: Sequence[tuple[int, int, Ints, Ints]]
) -> Ints:
    """Borders of all groups on which neighbours agree, (W, N), by looking from group to group.

    Args:
        borders: Of each group and option, (N, S).
        options: How many each group has.
        pairs: Two groups (the later one is the second), and what each of their options says.
    """
    before: list[list[tuple[int, Ints, Ints]]] = [[] for _ in borders]
    for one, other, given, taken in pairs:
        before[other].append((one, given, taken))
    # An option of each kind of borders.
    kinds = [
        {int(border): option for option, border in reversed([*enumerate(row[:count])])}
        for row, count in zip(borders, options, strict=True)
    ]
    found: list[list[int]] = []
    steps, stack = 0, [list[int]()]
    while stack and len(found) < _WAYS and steps < _STEPS:
        picks, steps = stack.pop(), steps + 1
        group = len(picks)
        if group == len(borders):
            found.append(picks)
            continue
        for option in sorted(kinds[group].values(), reverse=True):
            if all(given[picks[o]] == taken[option] for o, given, taken in before[group]):
                stack.append([*picks, option])
    rows = np.arange(len(borders))
    return np.array([borders[rows, picks] for picks in found], np.int64).reshape(-1, len(borders))
