"""Runs of equal groups in an op graph, so that 80 layers are shown as one layer, x80."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rlplace.graph.types import OpGraph
from rlplace.report.plan_view import short_names
from rlplace.units import ranges


@dataclass(frozen=True)
class Run:
    """`count` copies of `period` consecutive groups, the first of them group `start`."""

    start: int
    period: int = 1
    count: int = 1

    @property
    def stop(self) -> int:
        """The group after the last one."""
        return self.start + self.period * self.count

    def members(self, offset: int) -> range:
        """The groups that have one place in the period."""
        return range(self.start + offset, self.stop, self.period)


def runs(graph: OpGraph, fold: bool = True) -> list[Run]:
    """The groups of a graph as runs, in order; without `fold` each group is a run of its own.

    The copies of a run have the same structures, the same names but for numbers, and the same
    neighbours: each reads from the copy before it or from the same groups outside, and what a copy
    other than the last writes to the outside, all of them write there. So nothing of the graph's
    shape is lost (a skip connection of one layer keeps that layer apart).
    """
    found: list[Run] = []
    wiring = _Wiring(graph)
    start = 0
    while start < len(graph.groups):
        best = Run(start)
        repeating: list[int] = []
        for period in range(1, (len(graph.groups) - start) // 2 + 1 if fold else 0):
            if any(period % shorter == 0 for shorter in repeating):
                continue  # two layers at a time are no clearer than one
            run = wiring.longest(start, period)
            if run.count > 1:
                repeating.append(period)
                best = max(best, run, key=lambda run: run.stop)
        found.append(best)
        start = best.stop
    return found


class _Wiring:
    """What a group looks like to its neighbours."""

    def __init__(self, graph: OpGraph) -> None:
        size = len(graph.groups)
        self.kinds = [(g.structure, re.sub(r"\d+", "0", g.name)) for g in graph.groups]
        self.reads: list[set[int]] = [set() for _ in range(size)]
        self.writes: list[set[int]] = [set() for _ in range(size)]
        for edge in graph.edges:
            self.reads[edge.dst].add(edge.src)
            self.writes[edge.src].add(edge.dst)

    def longest(self, start: int, period: int) -> Run:
        """The longest legal run of a period from a group on."""
        count = 1
        while self._continues(start, period, count):
            count += 1
        while count > 1 and not self._closed(Run(start, period, count)):
            count -= 1
        return Run(start, period, count)

    def _continues(self, start: int, period: int, count: int) -> bool:
        """Whether copy `count` is like the one before it."""
        here = start + count * period
        if self.kinds[here : here + period] != self.kinds[here - period : here]:
            return False
        if count > 1:
            return all(
                self._sources(group, start) == self._sources(group - period, start)
                for group in range(here, here + period)
            )
        # The first copy reads from outside what the others read from the copy before them.
        for group in range(here, here + period):
            near, far = self._sources(group, here)
            near_before, far_before = self._sources(group - period, start)
            if near != near_before or {src for src in far if src < start} - far_before:
                return False
        return True

    def _sources(self, group: int, start: int) -> tuple[set[int], set[int]]:
        """What a group reads: from `start` on as distances, before it by number."""
        sources = self.reads[group]
        near = {src - group for src in sources if src >= start}
        return near, {src for src in sources if src < start}

    def _closed(self, run: Run) -> bool:
        """Whether all copies write to the same groups outside, the last perhaps to more."""
        outside = [
            [{dst for dst in self.writes[group] if dst >= run.stop} for group in copy]
            for copy in _copies(run)
        ]
        same = all(copy == outside[0] for copy in outside[:-1])
        return same and all(a <= b for a, b in zip(outside[0], outside[-1], strict=True))


def _copies(run: Run) -> Iterator[range]:
    for start in range(run.start, run.stop, run.period):
        yield range(start, start + run.period)


def shown_names(graph: OpGraph) -> list[str]:
    """Names of the groups, without a first part that all of them have."""
    names = [group.name for group in graph.groups]
    heads = {name.split(".")[0] for name in names if "." in name}
    return short_names(names) if len(heads) == 1 else names


def joint_name(names: Sequence[str]) -> str:
    """``layers.0-31.mlp``: names that differ in their numbers only, as one."""
    parts = [re.split(r"(\d+)", name) for name in names]
    joined = []
    for position, options in enumerate(zip(*parts, strict=True)):
        if position % 2 == 0 or len(set(options)) == 1:
            joined.append(options[0])
        else:
            joined.append(_numbers(sorted({int(option) for option in options})))
    return "".join(joined)


def _numbers(numbers: Sequence[int]) -> str:
    """``0-31``; ``0,2..30`` for even steps."""
    step = numbers[1] - numbers[0]
    if step > 1 and list(range(numbers[0], numbers[-1] + 1, step)) == list(numbers):
        return f"{numbers[0]},{numbers[1]}..{numbers[-1]}" if len(numbers) > 2 else ranges(numbers)
    return ranges(numbers)
