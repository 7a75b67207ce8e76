"""Ideals of a directed graph: the sets that hold all predecessors of their members.

A device that runs a contiguous part of a graph runs the difference of two ideals, so a program
over contiguous parts walks this lattice (Tarnawski et al., NeurIPS 2020, section 5.1).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Ideals:
    """All ideals by size, the empty one first and the whole graph last.

    Args:
        members: Each ideal as a bit set of vertices.
        first: Where the steps of each ideal begin, (ideals + 1,).
        target: The ideal that each step leads to, with one vertex more.
        vertex: That vertex.
    """

    members: tuple[int, ...]
    first: Ints
    target: Ints
    vertex: Ints

    def __len__(self) -> int:
        return len(self.members)

    def between(self, lower: int, upper: int) -> tuple[int, ...]:
        """The vertices of an ideal that are not in another."""
        bits = self.members[upper] & ~self.members[lower]
        return tuple(v for v in range(bits.bit_length()) if bits >> v & 1)

    def sums(self, values: Floats) -> Floats:
        """The sum of a value of the vertices over each ideal."""
        found = np.zeros(len(self))
        for ideal in range(len(self)):
            for step in range(self.first[ideal], self.first[ideal + 1]):
                found[self.target[step]] = found[ideal] + values[self.vertex[step]]
        return found


def find_ideals(predecessors: Sequence[Sequence[int]], most: int) -> Ideals | None:
    """All ideals of an acyclic graph; None if there are more than `most`.

    Args:
        predecessors: Those of each vertex.
        most: How many are worth it.
    """
    needs = [sum(1 << u for u in set(before)) for before in predecessors]
    successors: list[list[int]] = [[] for _ in needs]
    for vertex, before in enumerate(predecessors):
        for u in set(before):
            successors[u].append(vertex)
    level = {0: tuple(v for v, need in enumerate(needs) if need == 0)}
    members: list[int] = []
    first, target, vertices = [0], [], []
    while level:
        upper: dict[int, tuple[int, ...]] = {}
        places: dict[int, int] = {}
        base = len(members) + len(level)
        for ideal, ready in level.items():
            members.append(ideal)
            for v in ready:
                bigger = ideal | 1 << v
                if bigger not in upper:
                    freed = (w for w in successors[v] if needs[w] & ~bigger == 0)
                    upper[bigger] = (*(u for u in ready if u != v), *freed)
                    places[bigger] = base + len(places)
                target.append(places[bigger])
                vertices.append(v)
            first.append(len(target))
        if len(members) + len(upper) > most:
            return None
        level = upper
    as_ints = (np.array(column, np.int64) for column in (first, target, vertices))
    return Ideals(tuple(members), *as_ints)
