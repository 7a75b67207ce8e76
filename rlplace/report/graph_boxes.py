"""What a picture of an op graph is made of; lengths in inches, y grows downwards."""

from __future__ import annotations

from dataclasses import dataclass

from rlplace.report.layered import Drawing, Point, Size


@dataclass(frozen=True)
class Box:
    """A group, or equal groups of a folded run.

    Args:
        name: Its short name.
        figures: Its key figures, as text.
        groups: Indices of the groups that it stands for.
        share: Their share of the FLOPs of the model, forward and backward.
        x: Left side, in inches.
        y: Upper side, in inches; y grows downwards.
        width: In inches.
        height: In inches; grows with the share.
    """

    name: str
    figures: str
    groups: tuple[int, ...]
    share: float
    x: float
    y: float
    width: float
    height: float

    @property
    def centre(self) -> Point:
        """Its centre."""
        return self.x + self.width / 2, self.y + self.height / 2


@dataclass(frozen=True)
class Arrow:
    """Tensors that one box makes and another reads.

    Args:
        src: Position of a box in `Picture.boxes`.
        dst: The same.
        size: Bytes of one sample.
        points: From the border of the first box to the border of the second.
        leaves: Side of the first box: ``bottom``, ``top``, ``left`` or ``right``.
        enters: Side of the second box.
    """

    src: int
    dst: int
    size: float
    points: tuple[Point, ...]
    leaves: str
    enters: str


@dataclass(frozen=True)
class Frame:
    """Around the boxes of a folded run of several groups; x, y, width and height as of a box."""

    count: int
    x: float
    y: float
    width: float
    height: float

    def holds(self, box: Box) -> bool:
        """Whether a box stands inside."""
        x, y = box.centre
        return self.x < x < self.x + self.width and self.y < y < self.y + self.height


@dataclass(frozen=True)
class Picture:
    """All that is drawn; lengths in inches, the origin at the upper left."""

    title: str
    subtitle: str
    boxes: tuple[Box, ...]
    arrows: tuple[Arrow, ...]
    frames: tuple[Frame, ...]
    width: float
    height: float


@dataclass(frozen=True)
class Block:
    """A box, or the boxes of one copy of a folded run as they stand inside their frame."""

    boxes: range
    count: int
    size: Size
    inner: Drawing | None = None
    corner: Point = (0.0, 0.0)
