"""AmoebaNet-D (Real et al., 2018, arXiv 1802.01548), as GPipe (arXiv 1811.06965) scales it.

A cell reads the outputs of the two before it and adds five pairs of operations; what it hands on
are four of its states (normal cell) or three (reduction). The normal cell hands on the states of
the authors' reference implementation, which gives the parameters of the GPipe paper.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

_CLASSES = 1000
_IMAGE = 224

#: (state that it reads, operation), two a pair.
_NORMAL = (
    (1, "conv1"), (1, "max3"), (1, "none"), (0, "conv7"), (0, "conv1"),
    (0, "conv7"), (2, "max3"), (2, "none"), (1, "avg3"), (5, "conv1"),
)  # fmt: skip
_REDUCTION = (
    (0, "max2"), (0, "max3"), (2, "none"), (1, "conv3"), (2, "conv7"),
    (2, "max3"), (3, "none"), (1, "max2"), (2, "avg3"), (3, "conv1"),
)  # fmt: skip
_NORMAL_OUT, _REDUCTION_OUT = (0, 3, 4, 6), (4, 5, 6)


class AmoebaNet(nn.Module):
    """A classifier of images that returns its cross entropy.

    Args:
        cells: Normal cells, in three runs with a reduction cell between; a multiple of 3.
        filters: Four times the channels of the stem.
    """

    def __init__(self, cells: int, filters: int) -> None:
        super().__init__()
        channels = filters // 4
        self.stem = nn.Conv2d(3, channels, 3, stride=2, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(channels)
        run = [False] * (cells // 3)
        kinds = [True, True, *run, True, *run, True, *run]
        made, before, last, reduced = [], channels, channels, False
        for reduction in kinds:
            channels *= 2 if reduction else 1
            made.append(_Cell(before, last, channels, reduction, reduced))
            out = _REDUCTION_OUT if reduction else _NORMAL_OUT
            before, last, reduced = last, channels * len(out), reduction
        self.blocks = nn.ModuleList(made)
        self.head = nn.Linear(last, _CLASSES)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        """Loss of images (batch, 3, side, side) and labels (batch,)."""
        last = before = self.norm(self.stem(F.relu(images)))
        for cell in self.blocks:
            last, before = cell(last, before), last
        return F.cross_entropy(self.head(F.avg_pool2d(last, 7).flatten(1)), labels)

    def example(self, batch: int) -> dict[str, Tensor]:
        """Inputs of a batch, on torch's default device."""
        images = torch.empty(batch, 3, _IMAGE, _IMAGE)
        return {"images": images, "labels": torch.empty(batch, dtype=torch.long)}


class _Cell(nn.Module):
    def __init__(
        self, before: int, last: int, channels: int, reduction: bool, reduced: bool
    ) -> None:
        super().__init__()
        self.squeeze = _conv(last, channels, 1)
        self.squeeze_before: nn.Module = nn.Identity()
        if reduced:
            self.squeeze_before = _Halve(before, channels)
        elif before != channels:
            self.squeeze_before = _conv(before, channels, 1)
        pairs = _REDUCTION if reduction else _NORMAL
        self.reads = tuple(state for state, _ in pairs)
        self.out = _REDUCTION_OUT if reduction else _NORMAL_OUT
        self.operations = nn.ModuleList(
            _OPERATIONS[name](channels, 2 if reduction and state < 2 else 1)
            for state, name in pairs
        )

    def forward(self, last: Tensor, before: Tensor) -> Tensor:
        states = [self.squeeze(last), self.squeeze_before(before)]
        for index in range(0, len(self.reads), 2):
            first = self.operations[index](states[self.reads[index]])
            second = self.operations[index + 1](states[self.reads[index + 1]])
            states.append(first + second)
        return torch.cat([states[index] for index in self.out], dim=1)


class _Halve(nn.Module):
    """Half the side: two convolutions that read every second pixel, one of them shifted."""

    def __init__(self, inside: int, out: int) -> None:
        super().__init__()
        self.even = nn.Conv2d(inside, out // 2, 1, stride=2, bias=False)
        self.odd = nn.Conv2d(inside, out // 2, 1, stride=2, bias=False)
        self.norm = nn.BatchNorm2d(out)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(x)
        shifted = F.pad(x[:, :, 1:, 1:], (0, 1, 0, 1))
        out: Tensor = self.norm(torch.cat([self.even(x), self.odd(shifted)], dim=1))
        return out


def _conv(inside: int, out: int, side: int | tuple[int, int], stride: int = 1) -> nn.Sequential:
    """ReLU, a convolution that keeps the side (but for its stride along its long axes), norm."""
    height, width = (side, side) if isinstance(side, int) else side
    strides = (stride if height > 1 or width == 1 else 1, stride if width > 1 or height == 1 else 1)
    padding = (height // 2, width // 2)
    convolution = nn.Conv2d(inside, out, (height, width), strides, padding, bias=False)
    return nn.Sequential(nn.ReLU(), convolution, nn.BatchNorm2d(out))


def _bottleneck(channels: int, *middle: nn.Module) -> nn.Sequential:
    """Squeeze to a quarter of the channels, what is in the middle, and back."""
    quarter = channels // 4
    return nn.Sequential(_conv(channels, quarter, 1), *middle, _conv(quarter, channels, 1))


def _conv7(channels: int, stride: int) -> nn.Module:
    quarter = channels // 4
    return _bottleneck(
        channels, _conv(quarter, quarter, (1, 7), stride), _conv(quarter, quarter, (7, 1), stride)
    )


def _conv3(channels: int, stride: int) -> nn.Module:
    return _bottleneck(channels, _conv(channels // 4, channels // 4, 3, stride))


def _average(channels: int, stride: int) -> nn.Module:
    return nn.AvgPool2d(3, stride, padding=1, count_include_pad=False)


_OPERATIONS: dict[str, Callable[[int, int], nn.Module]] = {
    "none": lambda c, s: nn.Identity() if s == 1 else _Halve(c, c),
    "conv1": lambda c, s: _conv(c, c, 1, s),
    "conv3": _conv3,
    "conv7": _conv7,
    "avg3": _average,
    "max3": _average,  # torchgpipe's, which was measured, averages here too
    "max2": lambda c, s: nn.MaxPool2d(2, s),
}
