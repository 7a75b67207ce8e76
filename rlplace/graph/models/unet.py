"""The UNet of latent diffusion (Rombach et al., 2022, arXiv:2112.10752) on noise prediction.

Parameter for parameter the network of Stable Diffusion: residual blocks that are told the time,
transformer blocks that read the text, and a skip from every block on the way down to its
counterpart on the way up.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rlplace.graph.models.shapes import Unet, numbers

_STEPS = 1000


class UnetLoss(nn.Module):
    """Adds noise to latents and returns the mean square error of the predicted noise."""

    signal: Tensor

    def __init__(self, shape: Unet) -> None:
        super().__init__()
        self.unet = UnetModel(shape)
        # Stable Diffusion's schedule: square roots of beta equally spaced.
        betas = torch.linspace(0.00085**0.5, 0.012**0.5, _STEPS) ** 2
        self.register_buffer("signal", torch.cumprod(1.0 - betas, dim=0), persistent=False)

    def forward(self, latents: Tensor, noise: Tensor, timesteps: Tensor, context: Tensor) -> Tensor:
        """Loss of latents and noise (batch, channels, side, side), timesteps (batch,), text.

        The text `context` is (batch, length, width).
        """
        kept = self.signal[timesteps].view(-1, 1, 1, 1)
        noisy = kept.sqrt() * latents + (1.0 - kept).sqrt() * noise
        return F.mse_loss(self.unet(noisy, timesteps, context), noise)


class UnetModel(nn.Module):
    """Noise of a noisy latent, given its time step and a text."""

    frequencies: Tensor

    def __init__(self, shape: Unet) -> None:
        super().__init__()
        widths, depths, heads = map(numbers, (shape.widths, shape.transformers, shape.heads))
        first, time, groups = widths[0], 4 * widths[0], shape.norm_groups
        steps = torch.arange(first // 2) / (first // 2)
        self.register_buffer("frequencies", torch.exp(-math.log(10000.0) * steps), persistent=False)
        self.time = nn.Sequential(nn.Linear(first, time), nn.SiLU(), nn.Linear(time, time))
        self.conv_in = nn.Conv2d(shape.channels, first, 3, padding=1)
        skips, width = [first], first
        self.down, self.up = nn.ModuleList(), nn.ModuleList()
        for level, out in enumerate(widths):
            for _ in range(shape.blocks):
                text = (depths[level], heads[level], shape.context)
                self.down.append(_Block(width, out, time, groups, *text))
                skips.append(width := out)
            if level < len(widths) - 1:
                self.down.append(nn.Conv2d(width, width, 3, stride=2, padding=1))
                skips.append(width)
        self.middle = _Block(width, width, time, groups, shape.middle, heads[-1], shape.context)
        self.last = _Residual(width, width, time, groups)
        for level, out in reversed(list(enumerate(widths))):
            for _ in range(shape.blocks + 1):
                text = (depths[level], heads[level], shape.context)
                self.up.append(_Block(width + skips.pop(), out, time, groups, *text))
                width = out
            if level:
                self.up.append(_Upsample(width))
        self.norm_out = nn.GroupNorm(groups, first)
        self.conv_out = nn.Conv2d(first, shape.channels, 3, padding=1)

    def forward(self, noisy: Tensor, timesteps: Tensor, context: Tensor) -> Tensor:
        """Predicted noise, of the size of `noisy`."""
        angles = timesteps[:, None].to(self.frequencies.dtype) * self.frequencies
        time = F.silu(self.time(torch.cat([angles.cos(), angles.sin()], dim=-1)))
        x = self.conv_in(noisy)
        skips = [x]
        for layer in self.down:
            x = layer(x, time, context) if isinstance(layer, _Block) else layer(x)
            skips.append(x)
        x = self.last(self.middle(x, time, context), time)
        for layer in self.up:
            if isinstance(layer, _Block):
                x = layer(torch.cat([x, skips.pop()], dim=1), time, context)
            else:
                x = layer(x)
        out: Tensor = self.conv_out(F.silu(self.norm_out(x)))
        return out


class _Block(nn.Module):
    """A residual block, and after it transformer blocks over the pixels where there are any."""

    def __init__(
        self, width: int, out: int, time: int, groups: int, depth: int, heads: int, context: int
    ) -> None:
        super().__init__()
        self.residual = _Residual(width, out, time, groups)
        self.text = _Spatial(out, groups, depth, heads, context) if depth else None

    def forward(self, x: Tensor, time: Tensor, context: Tensor) -> Tensor:
        mixed: Tensor = self.residual(x, time)
        if self.text is not None:
            mixed = self.text(mixed, context)
        return mixed


class _Residual(nn.Module):
    """Two convolutions; the embedded time is added between them."""

    def __init__(self, width: int, out: int, time: int, groups: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(groups, width), nn.Conv2d(width, out, 3, padding=1)
        self.time = nn.Linear(time, out)
        self.norm2, self.conv2 = nn.GroupNorm(groups, out), nn.Conv2d(out, out, 3, padding=1)
        self.skip = nn.Identity() if width == out else nn.Conv2d(width, out, 1)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        hidden = self.conv1(F.silu(self.norm1(x))) + self.time(time)[:, :, None, None]
        hidden = self.conv2(F.silu(self.norm2(hidden)))
        out: Tensor = self.skip(x) + hidden
        return out


class _Spatial(nn.Module):
    """Transformer blocks whose tokens are the pixels."""

    def __init__(self, width: int, groups: int, depth: int, heads: int, context: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(groups, width)
        self.proj_in, self.proj_out = nn.Linear(width, width), nn.Linear(width, width)
        self.blocks = nn.ModuleList(_Transformer(width, heads, context) for _ in range(depth))

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        tokens = self.proj_in(self.norm(x).flatten(2).transpose(1, 2))
        for block in self.blocks:
            tokens = block(tokens, context)
        image: Tensor = self.proj_out(tokens).transpose(1, 2).reshape(x.shape)
        return x + image


class _Transformer(nn.Module):
    """Self-attention, cross-attention to the text, and a gated MLP."""

    def __init__(self, width: int, heads: int, context: int) -> None:
        super().__init__()
        self.norm1, self.norm2, self.norm3 = (nn.LayerNorm(width) for _ in range(3))
        self.self_attention = _Attention(width, heads, width)
        self.cross_attention = _Attention(width, heads, context)
        self.gate_up, self.down = nn.Linear(width, 8 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        normed = self.norm1(x)
        x = x + self.self_attention(normed, normed)
        x = x + self.cross_attention(self.norm2(x), context)
        inner, gate = self.gate_up(self.norm3(x)).chunk(2, dim=-1)
        out: Tensor = x + self.down(inner * F.gelu(gate))
        return out


class _Attention(nn.Module):
    """Attention of `x` to `source`, (batch, length, width) both."""

    def __init__(self, width: int, heads: int, source: int) -> None:
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(source, width, bias=False)
        self.value = nn.Linear(source, width, bias=False)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor, source: Tensor) -> Tensor:
        def split(y: Tensor) -> Tensor:
            return y.view(*y.shape[:2], self.heads, -1).transpose(1, 2)

        query, key, value = self.query(x), self.key(source), self.value(source)
        mixed = F.scaled_dot_product_attention(split(query), split(key), split(value))
        out: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return out


class _Upsample(nn.Module):
    """Twice the side, by repeating pixels, and a convolution."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.conv(F.interpolate(x, scale_factor=2.0, mode="nearest"))
        return out
