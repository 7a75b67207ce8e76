"""Drawing of a graph with nested skip connections (a U-Net) as the U that people know.

The way down stands at the left, the way up at the right, and each skip connection runs straight
across.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from rlplace.report.layered import Drawing, Edge, Point, Size, depths, layered, separated

#: Nested skip connections that make a U.
_LEAST_SKIPS = 2
#: A tensor that more boxes read (an embedding of the time step) is no skip connection.
_MOST_READERS = 3
#: Share of the long edges over the bottom that are nested, and of the depth that they span.
_LEAST_SHARE, _LEAST_SPAN = 0.6, 0.5
_ROUNDS = 8
#: Inches between the two arms.
_VALLEY = 1.6


def folded_at_the_bottom(sizes: Sequence[Size], edges: Sequence[Edge], gap: Size) -> Drawing | None:
    """Place boxes as a U, or None where the skip connections of the graph are not nested.

    Args:
        sizes: Width and height of each box, in a topological order.
        edges: (source, target), source before target.
        gap: Least distance of boxes beside and below each other.
    """
    layers = depths(len(sizes), edges)
    skips = nested_skips(layers, edges)
    if len(skips) < _LEAST_SKIPS:
        return None
    innermost = skips[-1]
    bottom = (layers[innermost[0]] + layers[innermost[1]]) // 2
    down = _arm(sizes, edges, [box for box in range(len(sizes)) if layers[box] <= bottom], gap)
    up = _arm(sizes, edges, [box for box in range(len(sizes)) if layers[box] > bottom], gap)
    return _joined(down, up, skips, len(sizes), layers, gap)


def nested_skips(layers: Sequence[int], edges: Sequence[Edge]) -> list[Edge]:
    """The nested skip connections over one layer, where they are most of those that pass it."""
    readers = Counter(source for source, _ in edges)
    long = [
        (source, target)
        for source, target in edges
        if layers[target] - layers[source] > 1 and readers[source] <= _MOST_READERS
    ]
    best: list[Edge] = []
    for layer in range(max(layers, default=0)):
        over = [(a, b) for a, b in long if layers[a] <= layer < layers[b]]
        chain = _longest_nested(layers, over)
        if len(chain) > len(best) and len(chain) >= _LEAST_SHARE * len(over):
            best = chain
    spans = [layers[target] - layers[source] for source, target in best]
    return best if max(spans, default=0) >= _LEAST_SPAN * max(layers, default=0) else []


def _longest_nested(layers: Sequence[int], over: Sequence[Edge]) -> list[Edge]:
    """The longest list of edges of which each starts after and ends before the one before it."""
    ordered = sorted(over, key=lambda edge: (layers[edge[0]], layers[edge[1]]))
    chains: list[list[Edge]] = []
    for source, target in ordered:
        outer = [
            chain
            for chain in chains
            if layers[chain[-1][0]] < layers[source] and layers[target] < layers[chain[-1][1]]
        ]
        chains.append([*max(outer, key=len, default=[]), (source, target)])
    return max(chains, key=len, default=[])


@dataclass
class _Arm:
    """One arm of the U, drawn downwards on its own.

    Args:
        boxes: Its boxes; positions in `drawing` follow this order.
        drawing: Where they are.
        rows: Height of each layer.
        width: Of the whole arm.
        ys: Centre of each layer, from the arm's open end.
    """

    boxes: list[int]
    drawing: Drawing
    rows: list[float]
    left: float
    width: float
    ys: list[float]

    def row(self, box: int) -> int:
        """The layer of a box inside the arm."""
        return self.drawing.layers[self.boxes.index(box)]

    def spans(self, gap: float) -> list[float]:
        """Least distances of the centres of the layers."""
        return [(a + b) / 2 + gap for a, b in pairwise(self.rows)]


def _arm(sizes: Sequence[Size], edges: Sequence[Edge], boxes: list[int], gap: Size) -> _Arm:
    position = {box: index for index, box in enumerate(boxes)}
    inner = [(position[a], position[b]) for a, b in edges if a in position and b in position]
    own = [sizes[box] for box in boxes]
    drawing = layered(own, inner, gap)
    rows = [0.0] * (max(drawing.layers, default=-1) + 1)
    for layer, (_, height) in zip(drawing.layers, own, strict=True):
        rows[layer] = max(rows[layer], height)
    left, _ = drawing.corner(own)
    ys = [0.0] * len(rows)
    for layer, (_, y) in zip(drawing.layers, drawing.centres, strict=True):
        ys[layer] = y
    return _Arm(boxes, drawing, rows, left, drawing.size(own)[0], ys)


def _joined(
    down: _Arm, up: _Arm, skips: Sequence[Edge], count: int, layers: list[int], gap: Size
) -> Drawing:
    """Level the two arms until the skip connections run straight across."""
    pairs = [(down.row(source), up.row(target)) for source, target in skips]
    rising = up.spans(gap[1])[::-1]  # from the top down
    last = len(up.rows) - 1
    ups = [0.0] * len(up.rows)
    for _ in range(_ROUNDS):
        wanted = {last - b: down.ys[a] for a, b in pairs}
        ups = _levelled(wanted, rising)
        wanted = {a: ups[last - b] for a, b in pairs}
        down.ys = _levelled(wanted, down.spans(gap[1]))
    up.ys = ups[::-1]
    centres: list[Point] = [(0.0, 0.0)] * count
    bends: dict[Edge, list[Point]] = {}
    offset = down.width + _VALLEY
    for arm, shift in ((down, -down.left), (up, offset - up.left)):
        for position, box in enumerate(arm.boxes):
            x, _ = arm.drawing.centres[position]
            centres[box] = (x + shift, arm.ys[arm.drawing.layers[position]])
        for (a, b), points in arm.drawing.bends.items():
            first = arm.drawing.layers[a] + 1
            side = 0.5 if arm is down else -0.5
            bends[arm.boxes[a], arm.boxes[b]] = [
                (
                    x + shift,
                    arm.ys[first + i // 2] + (side if i % 2 else -side) * arm.rows[first + i // 2],
                )
                for i, (x, _) in enumerate(points)
            ]
    return Drawing(centres, bends, layers, frozenset(up.boxes))


def _levelled(wanted: dict[int, float], spans: Sequence[float]) -> list[float]:
    """Positions of rows of which some want to be at a height; the others spread between them."""
    known = sorted(wanted)
    natural = np.concatenate([[0.0], np.cumsum(spans)])
    ys = np.interp(natural, natural[known], [wanted[row] for row in known])
    before, after = natural < natural[known[0]], natural > natural[known[-1]]
    ys[before] += natural[before] - natural[known[0]]
    ys[after] += natural[after] - natural[known[-1]]
    weights = [1.0 if row in wanted else 1e-3 for row in range(len(natural))]
    return separated(ys.tolist(), weights, spans)
