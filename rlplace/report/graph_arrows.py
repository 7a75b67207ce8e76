"""Routes of the arrows of a picture of an op graph: from which side to which, past what."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

from rlplace.report.graph_boxes import Arrow, Block, Box
from rlplace.report.layered import Drawing, Edge, Point

#: Inches between the ends of arrows on one side of a box.
_SPREAD = 0.22
#: Distance at which an arrow passes the boxes of its own frame.
_ASIDE = 0.16


def arrows(
    boxes: Sequence[Box],
    sizes: Mapping[Edge, float],
    blocks: Sequence[Block],
    block_of: Sequence[int],
    drawing: Drawing,
) -> list[Arrow]:
    """One arrow for each two boxes with a tensor between them.

    Args:
        boxes: Placed.
        sizes: Bytes of each arrow.
        blocks: Single boxes and frames, placed by `drawing`.
        block_of: The block of each box.
        drawing: Of the blocks.
    """
    found = []
    for (src, dst), size in sizes.items():
        first, second = block_of[src], block_of[dst]
        if first == second:
            arrow = _inside(src, dst, size, blocks[first], first in drawing.rising, boxes)
        else:
            arrow = _between(src, dst, size, first, second, blocks, drawing, boxes)
        found.append(arrow)
    return _spread(found, boxes)


def _inside(
    src: int, dst: int, size: float, block: Block, rises: bool, boxes: Sequence[Box]
) -> Arrow:
    """Between two boxes of a frame."""
    leaves, enters = ("top", "bottom") if rises else ("bottom", "top")
    assert block.inner is not None
    start = block.boxes.start
    layers = block.inner.layers
    if layers[dst - start] - layers[src - start] > 1:
        side = (boxes[src].x + boxes[src].width + _ASIDE, 0.0)
        bends = tuple((side[0], boxes[box].centre[1]) for box in (src, dst))
        return Arrow(src, dst, size, bends, "right", "right")
    return Arrow(src, dst, size, (), leaves, enters)


def _between(
    src: int,
    dst: int,
    size: float,
    first: int,
    second: int,
    blocks: Sequence[Block],
    drawing: Drawing,
    boxes: Sequence[Box],
) -> Arrow:
    a, b = boxes[src], boxes[dst]
    rises = first in drawing.rising
    if rises != (second in drawing.rising):
        return Arrow(src, dst, size, (), "right", "left")
    leaves, enters = ("top", "bottom") if rises else ("bottom", "top")
    bends = list(drawing.bends.get((first, second), ()))
    up = -1.0 if rises else 1.0
    if not _is_outer(src, blocks[first], last=True):
        leaves, x = _flank(a, bends[0][0] if bends else b.centre[0])
        edge = drawing.centres[first][1] + up * blocks[first].size[1] / 2
        bends.insert(0, (x, edge))
    if not _is_outer(dst, blocks[second], last=False):
        enters, x = _flank(b, bends[-1][0] if bends else a.centre[0])
        edge = drawing.centres[second][1] - up * blocks[second].size[1] / 2
        bends.append((x, edge))
    return Arrow(src, dst, size, tuple(bends), leaves, enters)


def _is_outer(box: int, block: Block, last: bool) -> bool:
    """Whether a box is in the first (or last) layer of its frame, so that nothing is in the way."""
    if block.inner is None:
        return True
    layers = block.inner.layers
    return layers[box - block.boxes.start] == (max(layers) if last else 0)


def _flank(box: Box, towards: float) -> tuple[str, float]:
    """The side of a box that faces a place, and the lane beside it."""
    if towards < box.centre[0]:
        return "left", box.x - _ASIDE
    return "right", box.x + box.width + _ASIDE


def _spread(found: Sequence[Arrow], boxes: Sequence[Box]) -> list[Arrow]:
    """Put the ends of the arrows beside each other on the sides of the boxes."""
    sides: dict[tuple[int, str], list[tuple[float, int, bool]]] = defaultdict(list)
    for index, arrow in enumerate(found):
        for box, side, is_end in (
            (arrow.src, arrow.leaves, False),
            (arrow.dst, arrow.enters, True),
        ):
            other = _neighbour(arrow, boxes, is_end)
            key = other[0] if side in ("top", "bottom") else other[1]
            sides[box, side].append((key, index, is_end))
    ends: dict[tuple[int, bool], Point] = {}
    for (box, side), meeting in sides.items():
        ordered = sorted(meeting)
        middle = _straight(boxes[box].centre[0], [key for key, _, _ in ordered], side)
        for place, (_, index, is_end) in enumerate(ordered):
            ends[index, is_end] = _port(boxes[box], side, place - middle, len(meeting))
    return [
        replace(arrow, points=(ends[index, False], *arrow.points, ends[index, True]))
        for index, arrow in enumerate(found)
    ]


def _neighbour(arrow: Arrow, boxes: Sequence[Box], is_end: bool) -> Point:
    """Where an arrow comes from or goes to, seen from one of its boxes."""
    if arrow.points:
        return arrow.points[-1 if is_end else 0]
    return boxes[arrow.src if is_end else arrow.dst].centre


def _straight(centre: float, keys: Sequence[float], side: str) -> float:
    """The place of the arrow that goes straight up or down, else the middle of them all."""
    if side in ("top", "bottom"):
        nearest = min(range(len(keys)), key=lambda place: abs(keys[place] - centre))
        if abs(keys[nearest] - centre) < _SPREAD:
            return float(nearest)
    return (len(keys) - 1) / 2


def _port(box: Box, side: str, place: float, count: int) -> Point:
    """A point on a side of a box, `place` steps from its middle."""
    x, y = box.centre
    along = box.width if side in ("top", "bottom") else box.height
    shift = place * min(_SPREAD, 0.4 * along / count)
    match side:
        case "top":
            return x + shift, box.y
        case "bottom":
            return x + shift, box.y + box.height
        case "left":
            return box.x, y + shift
        case _:
            return box.x + box.width, y + shift
