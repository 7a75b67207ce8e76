"""Layered drawing of a directed acyclic graph (Sugiyama, Tagawa and Toda, 1981).

Boxes stand in layers by their depth; long edges run through points of their own in the layers
between, so that they pass beside the boxes; neighbours are brought above each other.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

Size = tuple[float, float]
Point = tuple[float, float]
Edge = tuple[int, int]

_SWEEPS = 12
#: How much more a box resists being moved aside than a passing edge.
_BOX_WEIGHT = 1000.0
#: How much an end of a link counts that is of the other kind: boxes line up with boxes, the points
#: of an edge with each other.
_OTHER_KIND = 1e-6


@dataclass(frozen=True)
class Drawing:
    """Where everything is; y grows downwards.

    Args:
        centres: Centre of each box.
        bends: Points between the ends of each edge that spans several layers: where it comes into
            each layer that it passes, and where it leaves it.
        layers: Layer of each box.
        rising: Boxes on a way up, where the next layer is above (the second arm of a U).
    """

    centres: list[Point]
    bends: Mapping[Edge, list[Point]]
    layers: list[int]
    rising: frozenset[int] = frozenset()

    def size(self, sizes: Sequence[Size]) -> Size:
        """Width and height of all boxes together."""
        if not sizes:
            return 0.0, 0.0
        left, top, right, bottom = self._extent(sizes)
        return right - left, bottom - top

    def corner(self, sizes: Sequence[Size]) -> Point:
        """The upper left corner of all boxes together."""
        left, top, _, _ = self._extent(sizes)
        return left, top

    def moved(self, across: float, down: float) -> Drawing:
        """The same drawing at another place."""
        centres = [(x + across, y + down) for x, y in self.centres]
        bends = {
            edge: [(x + across, y + down) for x, y in points] for edge, points in self.bends.items()
        }
        return replace(self, centres=centres, bends=bends)

    def _extent(self, sizes: Sequence[Size]) -> tuple[float, float, float, float]:
        placed = list(zip(self.centres, sizes, strict=True))
        bends = [bend for points in self.bends.values() for bend in points]
        lefts = [x - width / 2 for (x, _), (width, _) in placed] + [x for x, _ in bends]
        rights = [x + width / 2 for (x, _), (width, _) in placed] + [x for x, _ in bends]
        tops = [y - height / 2 for (_, y), (_, height) in placed]
        bottoms = [y + height / 2 for (_, y), (_, height) in placed]
        return min(lefts), min(tops), max(rights), max(bottoms)


def layered(sizes: Sequence[Size], edges: Sequence[Edge], gap: Size, lane: float = 0.1) -> Drawing:
    """Place boxes of given sizes.

    Args:
        sizes: Width and height of each box, in a topological order.
        edges: (source, target), source before target.
        gap: Least distance of boxes beside and below each other.
        lane: Width that a passing edge takes; edges of one source share it.
    """
    layers = depths(len(sizes), edges)
    net = _Net(sizes, edges, layers, lane)
    rows = net.ordered_rows()
    xs = _positions(net, rows, gap[0])
    spans, top = [], 0.0
    for row in rows:
        height = max((net.heights[item] for item in row), default=0.0)
        spans.append((top, top + height))
        top += height + gap[1]
    centres = [(xs[box], sum(spans[layer]) / 2) for box, layer in enumerate(layers)]
    bends = {
        edge: [(xs[item], y) for item in path for y in spans[net.layers[item]]]
        for edge, path in net.paths.items()
        if path
    }
    return Drawing(centres, bends, layers)


def depths(count: int, edges: Sequence[Edge]) -> list[int]:
    """Length of the longest path to each box; a box that reads nothing is near its first reader."""
    layers = [0] * count
    for source, target in sorted(edges, key=lambda edge: edge[1]):
        layers[target] = max(layers[target], layers[source] + 1)
    reading = {target for _, target in edges}
    for box in range(count):
        readers = [layers[target] for source, target in edges if source == box]
        if box not in reading and readers:
            layers[box] = min(readers) - 1
    return layers


class _Net:
    """Boxes and the points where long edges pass a layer, with links between next layers only."""

    def __init__(
        self, sizes: Sequence[Size], edges: Sequence[Edge], layers: Sequence[int], lane: float
    ) -> None:
        self.boxes = len(sizes)
        self.layers = list(layers)
        self.widths = [width for width, _ in sizes]
        self.heights = [height for _, height in sizes]
        self.paths: dict[Edge, list[int]] = {}
        self.lanes: list[list[int]] = [[] for _ in sizes]
        passing: dict[tuple[int, int], int] = {}
        links: set[Edge] = set()
        for source, target in edges:
            path = []
            for layer in range(layers[source] + 1, layers[target]):
                if (source, layer) not in passing:
                    passing[source, layer] = len(self.layers)
                    self.lanes[source].append(len(self.layers))
                    self.layers.append(layer)
                    self.widths.append(lane)
                    self.heights.append(0.0)
                path.append(passing[source, layer])
            self.paths[source, target] = path
            chain = [source, *path, target]
            links.update(pairwise(chain))
        self.above: list[list[int]] = [[] for _ in self.layers]
        self.below: list[list[int]] = [[] for _ in self.layers]
        for upper, lower in sorted(links):
            self.above[lower].append(upper)
            self.below[upper].append(lower)

    def distance(self, a: int, b: int, gap: float) -> float:
        """Least distance of the centres of two neighbours; passing edges may be closer."""
        boxes = (a < self.boxes) + (b < self.boxes)
        return (self.widths[a] + self.widths[b]) / 2 + gap * (0.2, 0.5, 1.0)[boxes]

    def ordered_rows(self) -> list[list[int]]:
        """Items of each layer from left to right, with few crossings (barycentre sweeps)."""
        rows: list[list[int]] = [[] for _ in range(max(self.layers, default=-1) + 1)]
        for item, layer in enumerate(self.layers):
            rows[layer].append(item)
        best, fewest = [list(row) for row in rows], self._crossings(rows)
        for sweep in range(_SWEEPS):
            down = sweep % 2 == 0
            for row in rows if down else reversed(rows):
                self._sort(row, rows, self.above if down else self.below)
            if (crossings := self._crossings(rows)) < fewest:
                best, fewest = [list(row) for row in rows], crossings
        return best

    def _sort(self, row: list[int], rows: list[list[int]], near: list[list[int]]) -> None:
        def centre(item: int) -> float:
            beside = [rows[self.layers[other]].index(other) for other in near[item]]
            return sum(beside) / len(beside) if beside else float(row.index(item))

        row[:] = [item for _, item in sorted((centre(item), item) for item in row)]

    def _crossings(self, rows: Sequence[Sequence[int]]) -> int:
        place = {item: position for row in rows for position, item in enumerate(row)}
        total = 0
        for row in rows:
            ends = [sorted(place[low] for low in self.below[item]) for item in row]
            flat = [end for each in ends for end in each]
            total += sum(a > b for i, a in enumerate(flat) for b in flat[i + 1 :])
        return total


def _positions(net: _Net, rows: Sequence[Sequence[int]], gap: float) -> list[float]:
    """Centres from left to right: near the neighbours above and below, never too close."""
    xs = [0.0] * len(net.layers)
    for sweep in range(_SWEEPS):
        for row in rows if sweep % 2 == 0 else reversed(rows):
            wanted, weights = [], []
            for item in row:
                if sweep >= _SWEEPS - 2:
                    near = net.above[item] + net.below[item]
                else:
                    near = (net.above if sweep % 2 == 0 else net.below)[item]
                wanted.append(_mean(net, xs, item, near))
                weights.append(_BOX_WEIGHT if item < net.boxes else 1.0)
            spans = [net.distance(a, b, gap) for a, b in pairwise(row)]
            for item, x in zip(row, separated(wanted, weights, spans), strict=True):
                xs[item] = x
    _straighten(net, rows, xs, gap)
    return xs


def _straighten(net: _Net, rows: Sequence[Sequence[int]], xs: list[float], gap: float) -> None:
    """Bring the points of each edge above each other, where nothing is in the way."""
    left_of = {b: a for row in rows for a, b in pairwise(row)}
    right_of = {a: b for b, a in left_of.items()}

    for _ in range(3):
        for chain in filter(None, net.lanes):
            least, most = -math.inf, math.inf
            for item in chain:
                if (left := left_of.get(item)) is not None:
                    least = max(least, xs[left] + net.distance(left, item, gap))
                if (right := right_of.get(item)) is not None:
                    most = min(most, xs[right] - net.distance(item, right, gap))
            if least <= most:
                mean = sum(xs[item] for item in chain) / len(chain)
                for item in chain:
                    xs[item] = min(max(mean, least), most)


def _mean(net: _Net, xs: Sequence[float], item: int, near: Sequence[int]) -> float:
    """Where an item would stand, were it alone."""
    is_box = item < net.boxes
    weights = [1.0 if (other < net.boxes) == is_box else _OTHER_KIND for other in near]
    total = sum(weight * xs[other] for weight, other in zip(weights, near, strict=True))
    return total / sum(weights) if weights else xs[item]


def separated(
    wanted: Sequence[float], weights: Sequence[float], spans: Sequence[float]
) -> list[float]:
    """The positions nearest to the wanted ones (least squares) that keep their distances.

    Pool adjacent violators, after the distances are taken out.

    Args:
        wanted: Wanted positions, in the order that they must have.
        weights: How much each resists.
        spans: Least distance between each two neighbours.
    """
    offsets = [0.0]
    for span in spans:
        offsets.append(offsets[-1] + span)
    pools: list[tuple[float, float, int]] = []
    for target, weight, offset in zip(wanted, weights, offsets, strict=False):
        pools.append((target - offset, weight, 1))
        while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
            (a, wa, na), (b, wb, nb) = pools[-2:]
            pools[-2:] = [((a * wa + b * wb) / (wa + wb), wa + wb, na + nb)]
    flat = [value for value, _, size in pools for _ in range(size)]
    return [value + offset for value, offset in zip(flat, offsets, strict=False)]
