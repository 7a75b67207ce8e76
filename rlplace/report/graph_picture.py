"""Where the boxes and arrows of a picture of an op graph are: a pure function.

Equal layers are drawn once, boxes grow with their share of the FLOPs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from rlplace.graph.types import OpGraph
from rlplace.plan.types import PRECISIONS
from rlplace.report.folds import Run, joint_name, runs, shown_names
from rlplace.report.graph_arrows import arrows
from rlplace.report.graph_boxes import Block, Box, Frame, Picture
from rlplace.report.layered import Drawing, Edge, Size, layered
from rlplace.report.skips import folded_at_the_bottom
from rlplace.units import format_count

#: Inches.
BOX_WIDTH, _LEAST_HEIGHT, _MOST_HEIGHT = 2.5, 0.46, 1.15
_GAP: Size = (0.45, 0.34)
_INNER_GAP: Size = (0.3, 0.26)
_FRAME_MARGIN = 0.3
_FRAME_HEAD = 0.32
_MARGIN = 0.35
_NAME_LENGTH = 42


def picture(graph: OpGraph, precision: str = "bf16-mixed", fold: bool = True) -> Picture:
    """Where the boxes and arrows of a graph are.

    Args:
        graph: The model.
        precision: A name of `PRECISIONS`, for the bytes of the arrows.
        fold: Draw equal layers once.
    """
    found = runs(graph, fold)
    names = shown_names(graph)
    boxes = [
        _box(graph, names, run.members(offset)) for run in found for offset in range(run.period)
    ]
    sizes = _arrow_sizes(graph, boxes, PRECISIONS[precision].activation)
    blocks = _blocks(found, boxes, list(sizes))
    block_of = [index for index, block in enumerate(blocks) for _ in block.boxes]
    outer = sorted({(block_of[a], block_of[b]) for a, b in sizes if block_of[a] != block_of[b]})
    extents = [block.size for block in blocks]
    drawing = folded_at_the_bottom(extents, outer, _GAP) or layered(extents, outer, _GAP)
    left, top = drawing.corner(extents)
    drawing = drawing.moved(_MARGIN - left, _MARGIN - top)
    placed, frames = _place(blocks, boxes, drawing)
    width, height = drawing.size(extents)
    return Picture(
        title=graph.name,
        subtitle=_subtitle(graph),
        boxes=tuple(placed),
        arrows=tuple(arrows(placed, sizes, blocks, block_of, drawing)),
        frames=tuple(frames),
        width=width + 2 * _MARGIN,
        height=height + 2 * _MARGIN,
    )


def _box(graph: OpGraph, names: Sequence[str], groups: range) -> Box:
    work = graph.structure(groups[0]).work
    whole = graph.model_flops(1) or 1.0
    share = len(groups) * (work.flops(1) + work.backward_flops(1)) / whole
    params = work.params + work.frozen_params
    parts = [f"{format_count(params)} params"] if params else []
    parts += [f"{format_count(work.flops(1))}FLOP"] if work.flops(1) else []
    times = f"  x{len(groups)}" if len(groups) > 1 else ""
    height = _LEAST_HEIGHT + (_MOST_HEIGHT - _LEAST_HEIGHT) * min(share, 0.5) / 0.5
    name = _clipped(joint_name([names[group] for group in groups]), _NAME_LENGTH)
    figures = ", ".join(parts) or f"{len(graph.groups[groups[0]].ops)} ops"
    return Box(name, figures + times, tuple(groups), share, 0.0, 0.0, BOX_WIDTH, height)


def _clipped(text: str, length: int) -> str:
    """The end of a long name says more than its middle."""
    if len(text) <= length:
        return text
    head = length // 3
    return f"{text[:head]}…{text[head + 1 - length :]}"


def _arrow_sizes(graph: OpGraph, boxes: Sequence[Box], element: int) -> dict[Edge, float]:
    """Bytes of each arrow; each tensor once. From one copy of a run to the next there is none."""
    box_of = {group: index for index, box in enumerate(boxes) for group in box.groups}
    tensors: dict[Edge, dict[str, float]] = {}
    for edge in graph.edges:
        arrow = box_of[edge.src], box_of[edge.dst]
        if arrow[0] < arrow[1] and _same_copy(edge.src, edge.dst, boxes, arrow):
            size = edge.floats(1) * element + edge.other_bytes(1)
            tensors.setdefault(arrow, {})[edge.tensor] = size
    return {arrow: max(sizes.values(), default=0.0) for arrow, sizes in sorted(tensors.items())}


def _same_copy(src: int, dst: int, boxes: Sequence[Box], arrow: Edge) -> bool:
    """Whether an edge between two boxes of one run stays in one copy (others always do)."""
    first, second = boxes[arrow[0]].groups, boxes[arrow[1]].groups
    if len(first) != len(second) or len(first) == 1 or first[1] <= second[0]:
        return True
    return first.index(src) == second.index(dst)


def _blocks(found: Sequence[Run], boxes: Sequence[Box], edges: Sequence[Edge]) -> list[Block]:
    blocks = []
    start = 0
    for run in found:
        inside = range(start, start + run.period)
        sizes = [(boxes[index].width, boxes[index].height) for index in inside]
        if run.period == 1:
            blocks.append(Block(inside, run.count, sizes[0]))
        else:
            inner = [(a - start, b - start) for a, b in edges if a in inside and b in inside]
            drawing = layered(sizes, inner, _INNER_GAP)
            width, height = drawing.size(sizes)
            size = (width + 2 * _FRAME_MARGIN, height + _FRAME_MARGIN + _FRAME_HEAD)
            blocks.append(Block(inside, run.count, size, drawing, drawing.corner(sizes)))
        start = inside.stop
    return blocks


def _place(
    blocks: Sequence[Block], boxes: Sequence[Box], drawing: Drawing
) -> tuple[list[Box], list[Frame]]:
    placed: list[Box] = []
    frames = []
    for index, (block, (x, y)) in enumerate(zip(blocks, drawing.centres, strict=True)):
        left, top = x - block.size[0] / 2, y - block.size[1] / 2
        if block.inner is None:
            placed.append(replace(boxes[block.boxes[0]], x=left, y=top))
            continue
        frames.append(Frame(block.count, left, top, *block.size))
        for position, (cx, cy) in zip(block.boxes, block.inner.centres, strict=True):
            box = boxes[position]
            across = cx - block.corner[0] - box.width / 2
            down = cy - block.corner[1] - box.height / 2
            if index in drawing.rising:
                down = block.size[1] - _FRAME_MARGIN - _FRAME_HEAD - down - box.height
            x, y = left + _FRAME_MARGIN + across, top + _FRAME_HEAD + down
            placed.append(replace(box, x=x, y=y))
    return placed, frames


def _subtitle(graph: OpGraph) -> str:
    tokens = graph.tokens_per_sample
    sample = f"a sample of {tokens} tokens" if tokens > 1 else "a sample"
    return (
        f"{format_count(graph.params)} parameters, {len(graph.groups)} groups, "
        f"{format_count(graph.model_flops(1))}FLOP {sample}"
    )
