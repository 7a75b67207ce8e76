"""Paint a picture of an op graph with matplotlib."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlplace.errors import InputError
from rlplace.report.graph_boxes import Arrow, Box, Frame, Picture
from rlplace.report.layered import Point

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import Colormap

SUFFIXES = (".png", ".svg", ".pdf")
_HEAD, _FOOT = 0.55, 0.75
_LEAST_WIDTH = 6.5
_INK, _LINE, _FRAME = "#222222", "#4a5568", "#94a3b8"
#: Arrows of a box that has more of them are drawn faintly.
_FEW = 4


def draw_graph(picture: Picture, path: str | Path) -> Path:
    """Paint a picture into a file.

    Args:
        picture: What `rlplace.report.graph_picture.picture` computed.
        path: PNG, SVG or PDF by the suffix.

    Raises:
        InputError: If the suffix is none of them.
    """
    target = check_suffix(path)
    from matplotlib import colormaps, rc_context
    from matplotlib.figure import Figure

    width, height = max(picture.width, _LEAST_WIDTH), picture.height + _HEAD + _FOOT
    figure = Figure(figsize=(width, height))
    axes = figure.add_axes((0.0, 0.0, 1.0, 1.0))
    spare = (width - picture.width) / 2
    axes.set_xlim(-spare, picture.width + spare)
    axes.set_ylim(picture.height + _FOOT, -_HEAD)
    axes.axis("off")
    colours = colormaps["YlOrRd"]
    top = max((box.share for box in picture.boxes), default=1.0) or 1.0
    for frame in picture.frames:
        _paint_frame(axes, frame)
    most = max((arrow.size for arrow in picture.arrows), default=1.0) or 1.0
    readers = Counter(arrow.src for arrow in picture.arrows)
    for arrow in picture.arrows:
        _paint_arrow(axes, arrow, arrow.size / most, readers[arrow.src] > _FEW)
    for box in picture.boxes:
        stacked = len(box.groups) > 1 and not any(frame.holds(box) for frame in picture.frames)
        _paint_box(axes, box, colours, box.share / top, stacked)
    middle: dict[str, Any] = {"ha": "center", "va": "center", "color": _INK}
    axes.text(picture.width / 2, -0.32, picture.title, fontsize=13, fontweight="bold", **middle)
    axes.text(picture.width / 2, -0.08, picture.subtitle, fontsize=9, **middle)
    _paint_bar(axes, picture, colours, top)
    with rc_context({"svg.fonttype": "none"}):
        figure.savefig(target, dpi=130)
    return target


def check_suffix(path: str | Path) -> Path:
    """The path of a picture.

    Raises:
        InputError: If it ends in none of `SUFFIXES`.
    """
    target = Path(path)
    if target.suffix not in SUFFIXES:
        rule = f"must end in one of {', '.join(SUFFIXES)}"
        raise InputError("picture", str(path), rule, target.with_suffix(".png").name)
    return target


def _paint_box(axes: Axes, box: Box, colours: Colormap, heat: float, stacked: bool) -> None:
    from matplotlib.patches import FancyBboxPatch

    colour = colours(0.03 + 0.77 * heat)
    rounded = "round,pad=0,rounding_size=0.07"
    behind = 2 if stacked else 0
    for sheet in range(behind, -1, -1):
        corner = box.x + 0.05 * sheet, box.y - 0.05 * sheet
        axes.add_patch(
            FancyBboxPatch(
                corner,
                box.width,
                box.height,
                boxstyle=rounded,
                facecolor=colour,
                edgecolor=_LINE,
                linewidth=0.8,
                zorder=3,
            )
        )
    ink = "white" if heat > 0.72 else _INK
    x, y = box.centre
    size = min(8.5, 8.5 * 29 / max(len(box.name), 1))
    common: dict[str, Any] = {"ha": "center", "va": "center", "color": ink, "zorder": 4}
    axes.text(x, y - 0.09, box.name, fontsize=size, fontweight="bold", **common)
    axes.text(x, y + 0.1, box.figures, fontsize=7, **common)


def _paint_frame(axes: Axes, frame: Frame) -> None:
    from matplotlib.patches import FancyBboxPatch

    rounded = "round,pad=0,rounding_size=0.12"
    axes.add_patch(
        FancyBboxPatch(
            (frame.x, frame.y),
            frame.width,
            frame.height,
            boxstyle=rounded,
            facecolor="#f1f5f9",
            edgecolor=_FRAME,
            linewidth=1.0,
            linestyle=(0, (4, 2)),
            zorder=0,
        )
    )
    axes.text(
        frame.x + 0.1,
        frame.y + 0.16,
        f"x{frame.count}",
        ha="left",
        va="center",
        fontsize=10,
        fontweight="bold",
        color="#475569",
        zorder=4,
    )


def _paint_arrow(axes: Axes, arrow: Arrow, weight: float, faint: bool) -> None:
    from matplotlib.patches import FancyArrowPatch
    from matplotlib.path import Path as Curve

    points, codes = curve(arrow)
    axes.add_patch(
        FancyArrowPatch(
            path=Curve(points, codes),
            arrowstyle="-|>,head_length=3,head_width=1.8",
            linewidth=0.7 + 2.3 * weight**0.5,
            color=_FRAME if faint else _LINE,
            shrinkA=0,
            shrinkB=0,
            capstyle="butt",
            joinstyle="miter",
            zorder=2,
        )
    )


def curve(arrow: Arrow) -> tuple[list[Point], list[int]]:
    """Points and codes of a matplotlib path: cubic pieces, upright where it passes a layer."""
    move, cubic = 1, 4
    points, codes = [arrow.points[0]], [move]
    last = len(arrow.points) - 2
    for index, (start, end) in enumerate(pairwise(arrow.points)):
        dx, dy = end[0] - start[0], end[1] - start[1]
        first = _handle(start, arrow.leaves if index == 0 else "", dx, dy)
        second = _handle(end, arrow.enters if index == last else "", -dx, -dy)
        points += [first, second, end]
        codes += [cubic] * 3
    return points, codes


def _handle(point: Point, side: str, dx: float, dy: float) -> Point:
    """Control point beside an end: out of the side of a box, else up or down."""
    x, y = point
    if side in ("left", "right"):
        reach = max(0.5 * abs(dx), 0.12)
        return (x - reach if side == "left" else x + reach), y
    return x, y + 0.5 * dy


def _paint_bar(axes: Axes, picture: Picture, colours: Colormap, top: float) -> None:
    """The colour bar, below the graph."""
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import LinearSegmentedColormap, Normalize

    used = LinearSegmentedColormap.from_list(
        "used", [colours(0.03 + 0.77 * i / 20) for i in range(21)]
    )
    length = min(3.5, picture.width - 0.4)
    bar = axes.inset_axes(
        ((picture.width - length) / 2, picture.height + 0.32, length, 0.13),
        transform=axes.transData,
    )
    figure = axes.figure
    scale = ScalarMappable(Normalize(0.0, 100.0 * top), used)
    made = figure.colorbar(scale, cax=bar, orientation="horizontal")
    made.outline.set_visible(False)
    bar.tick_params(labelsize=7, length=2, colors=_INK)
    bar.xaxis.set_ticks_position("bottom")
    axes.text(
        picture.width / 2,
        picture.height + 0.16,
        "% of the FLOPs of the model, forward and backward; arrows by bytes",
        ha="center",
        va="center",
        fontsize=7.5,
        color=_INK,
    )
