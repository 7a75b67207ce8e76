"""Nodes of an ONNX graph to groups: cut where little is alive between two working ops.

The nodes stay in the order of the file, which is topological, and a group is an interval of it:
convex and deterministic. Between two neighbouring anchors (matmul-like ops and look-ups) lies at
most one cut, at the place where the fewest tensors with a gradient are alive, then not before an
activation function, then with the fewest elements, then the earliest. It is a cut if one tensor is
alive there, so that branches stay together; an interval of very many anchors is cut at its best
places even so.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

MAX_ANCHORS = 16
MAX_GROUPS = 200


@dataclass(frozen=True)
class Body:
    """What the cuts depend on, by position in the body.

    Args:
        anchors: Positions of the ops that groups are built around.
        spans: Of each tensor that a node makes: maker, last reader, elements, and whether a
            gradient flows through it (masks and indices do not count as alive).
        size: Number of nodes.
        glued: Positions of nodes that belong to what stands before them: activation functions.
    """

    anchors: Sequence[int]
    spans: Iterable[tuple[int, int, int, bool]]
    size: int
    glued: frozenset[int] = frozenset()


def intervals(body: Body) -> list[tuple[int, int]]:
    """Beginning and end of each group, in order; together they are the whole body."""
    alive, volume = [0] * (body.size + 1), [0] * (body.size + 1)
    for maker, last, elements, counts in body.spans:
        for position in range(maker + 1, last + 1):
            alive[position] += counts
            volume[position] += elements
    places = [
        min(range(left + 1, right + 1), key=lambda p: (alive[p], p in body.glued, volume[p], p))
        for left, right in pairwise(body.anchors)
    ]
    cuts = [place for place in places if alive[place] <= 1]
    for start, stop in pairwise([0, *cuts, body.size]):
        inner = [place for place in places if start < place < stop]
        if inner and sum(start <= a < stop for a in body.anchors) > MAX_ANCHORS:
            fewest = min(alive[place] for place in inner)
            cuts += [place for place in inner if alive[place] == fewest]
    cuts = sorted(cuts)
    while len(cuts) >= MAX_GROUPS:
        cuts = cuts[1::2]
    return list(pairwise([0, *cuts, body.size]))
