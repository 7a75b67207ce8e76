"""torchgpipe's simplified U-Net (arXiv 2004.09910): stacks of 3x3 convolutions on each level.

A level is `convolutions` times convolution, dropout, instance norm and leaky ReLU; the way down
halves the side and doubles the channels, the way up reads the level's skip.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

_SIDE = 192


class TorchgpipeUnet(nn.Module):
    """A segmentation into one class that returns its binary cross entropy."""

    def __init__(self, depth: int, convolutions: int, channels: int) -> None:
        super().__init__()
        widths = [channels << level for level in range(depth)]
        ins = [3, *widths]
        self.down = nn.ModuleList(
            _stack(ins[level], widths[level], widths[level], convolutions) for level in range(depth)
        )
        self.middle = _stack(widths[-1], 2 * widths[-1], widths[-1], convolutions)
        outs = [channels << level >> 1 for level in range(depth)]
        self.up = nn.ModuleList(
            _stack(2 * widths[level], outs[level], outs[level], convolutions)
            for level in reversed(range(depth))
        )
        self.head = nn.Conv2d(outs[0], 1, 1, bias=False)

    def forward(self, images: Tensor, masks: Tensor) -> Tensor:
        """Loss of images (batch, 3, side, side) and masks (batch, 1, side, side)."""
        x, skips = images, []
        for stack in self.down:
            x = stack(x)
            skips.append(x)
            x = F.max_pool2d(x, 2)
        x = self.middle(x)
        for stack in self.up:
            x = F.interpolate(x, scale_factor=2.0, mode="nearest")
            x = stack(torch.cat([x, skips.pop()], dim=1))
        return F.binary_cross_entropy_with_logits(self.head(x), masks)

    def example(self, batch: int) -> dict[str, Tensor]:
        """Inputs of a batch, on torch's default device."""
        images = torch.empty(batch, 3, _SIDE, _SIDE)
        return {"images": images, "masks": torch.empty(batch, 1, _SIDE, _SIDE)}


def _stack(inside: int, middle: int, out: int, count: int) -> nn.Sequential:
    widths = [inside, *([middle] * (count - 1)), out]
    layers: list[nn.Module] = []
    for index in range(count):
        layers += [
            nn.Conv2d(widths[index], widths[index + 1], 3, padding=1, bias=False),
            nn.Dropout2d(0.1),
            nn.InstanceNorm2d(widths[index + 1]),
            nn.LeakyReLU(0.01),
        ]
    return nn.Sequential(*layers)
