"""Alpa's Wide-ResNet-50 (arXiv 2201.12023): the 3x3 convolution of a bottleneck is wider.

1x1 to `channels`, 3x3 to `width` times as many, 1x1 to four times; the parameters of all sizes in
the paper's artifact follow from it.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

_DEPTHS = (3, 4, 6, 3)
_CLASSES = 1000


class WideResNet(nn.Module):
    """A classifier of images that returns its cross entropy."""

    def __init__(self, channels: int, width: int, image: int = 224) -> None:
        super().__init__()
        self.image = image
        self.stem = nn.Conv2d(3, channels, 7, stride=2, padding=3, bias=False)
        self.norm = nn.BatchNorm2d(channels)
        blocks, inside = [], channels
        for level, depth in enumerate(_DEPTHS):
            for index in range(depth):
                stride = 2 if level and index == 0 else 1
                blocks.append(_Bottleneck(inside, channels << level, width, stride))
                inside = 4 * (channels << level)
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(inside, _CLASSES)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        """Loss of images (batch, 3, side, side) and labels (batch,)."""
        x = F.max_pool2d(F.relu(self.norm(self.stem(images))), 3, stride=2, padding=1)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x.mean((2, 3))), labels)

    def example(self, batch: int) -> dict[str, Tensor]:
        """Inputs of a batch, on torch's default device."""
        images = torch.empty(batch, 3, self.image, self.image)
        return {"images": images, "labels": torch.empty(batch, dtype=torch.long)}


class _Bottleneck(nn.Module):
    def __init__(self, inside: int, channels: int, width: int, stride: int) -> None:
        super().__init__()
        wide, out = width * channels, 4 * channels
        self.conv1 = nn.Conv2d(inside, channels, 1, bias=False)
        self.conv2 = nn.Conv2d(channels, wide, 3, stride, padding=1, bias=False)
        self.conv3 = nn.Conv2d(wide, out, 1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(channels), nn.BatchNorm2d(wide)
        self.norm3 = nn.BatchNorm2d(out)
        self.skip: nn.Module = nn.Identity()
        if inside != out:
            shortcut = nn.Conv2d(inside, out, 1, stride, bias=False)
            self.skip = nn.Sequential(shortcut, nn.BatchNorm2d(out))

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        y = F.relu(self.norm2(self.conv2(y)))
        return F.relu(self.norm3(self.conv3(y)) + self.skip(x))
