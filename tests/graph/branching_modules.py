"""Small modules whose parts run side by side, skip one another, or are used twice."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rlplace.graph.program import Program, export_program

WIDTH = 16


def conv(fan_in: int, fan_out: int, kernel: int = 1) -> nn.Module:
    """A convolution with its norm and activation."""
    made = nn.Conv2d(fan_in, fan_out, kernel, padding=kernel // 2, bias=False)
    return nn.Sequential(made, nn.BatchNorm2d(fan_out), nn.ReLU(inplace=True))


class Cell(nn.Module):
    """Four branches of one to three convolutions, concatenated."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.branch1x1 = conv(width, 4)
        self.branch5x5_1, self.branch5x5_2 = conv(width, 4), conv(4, 4, 5)
        self.branch3x3_1, self.branch3x3_2 = conv(width, 4), conv(4, 4, 3)
        self.branch3x3_3 = conv(4, 4, 3)
        self.branch_pool = conv(width, 4)

    def forward(self, x: Tensor) -> Tensor:
        wide = self.branch5x5_2(self.branch5x5_1(x))
        deep = self.branch3x3_3(self.branch3x3_2(self.branch3x3_1(x)))
        pooled = self.branch_pool(F.avg_pool2d(x, 3, 1, 1))
        return torch.cat([self.branch1x1(x), wide, deep, pooled], dim=1)


class Inception(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = conv(3, 16, 3)
        self.mixed_5b, self.mixed_5c = Cell(16), Cell(16)
        self.fc = nn.Linear(16, 4)

    def forward(self, image: Tensor) -> Tensor:
        x = self.mixed_5c(self.mixed_5b(self.stem(image)))
        logits: Tensor = self.fc(x.mean((2, 3)))
        return logits.logsumexp(1).mean()


class UNet(nn.Module):
    """Four levels with long skips."""

    def __init__(self) -> None:
        super().__init__()
        widths = [4, 6, 8, 10]
        self.down = nn.ModuleList(
            nn.Sequential(conv(a, b, 3), conv(b, b, 3))
            for a, b in zip([3, *widths], widths, strict=False)
        )
        self.mid = nn.Sequential(conv(10, 12, 3), conv(12, 10, 3))
        self.up = nn.ModuleList(
            nn.Sequential(conv(a + b, b, 3), conv(b, b, 3))
            for a, b in zip([10, *widths[::-1]], widths[::-1], strict=False)
        )
        self.out = nn.Conv2d(4, 3, 1)

    def forward(self, image: Tensor) -> Tensor:
        x, skips = image, []
        for level in self.down:
            x = level(x)
            skips.append(x)
            x = F.max_pool2d(x, 2)
        x = self.mid(x)
        for level in self.up:
            x = level(torch.cat([skips.pop(), F.interpolate(x, scale_factor=2)], dim=1))
        made: Tensor = self.out(x)
        return made.square().mean()


class Attention(nn.Module):
    def __init__(self, linear: Callable[[int, int], nn.Module] = nn.Linear) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        heads = [t.unflatten(-1, (2, -1)).transpose(1, 2) for t in (self.k(memory), self.v(memory))]
        query = self.q(x).unflatten(-1, (2, -1)).transpose(1, 2)
        mixed = F.scaled_dot_product_attention(query, *heads)
        result: Tensor = self.o(mixed.transpose(1, 2).flatten(2))
        return result


class Mlp(nn.Module):
    def __init__(self, linear: Callable[[int, int], nn.Module] = nn.Linear) -> None:
        super().__init__()
        self.up, self.down = linear(WIDTH, 2 * WIDTH), linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.down(F.gelu(self.up(x)))
        return result


class Layer(nn.Module):
    """Attention, over a memory too if it is given one, and an MLP, each with its residual."""

    def __init__(
        self, linear: Callable[[int, int], nn.Module] = nn.Linear, cross: bool = False
    ) -> None:
        super().__init__()
        self.attn, self.mlp = Attention(linear), Mlp(linear)
        self.cross = Attention(linear) if cross else None
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(3))

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        h = self.norms[0](x)
        x = x + self.attn(h, h)
        if self.cross is not None:
            assert memory is not None
            x = x + self.cross(self.norms[1](x), memory)
        result: Tensor = x + self.mlp(self.norms[2](x))
        return result


class Layers(nn.Module):
    """Equal layers; the first one reads the float input itself."""

    def __init__(self, count: int, linear: Callable[[int, int], nn.Module] = nn.Linear) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(linear) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.mean()


class ParallelLayer(nn.Module):
    """Attention and MLP side by side."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attn, self.mlp = nn.LayerNorm(WIDTH), Attention(), Mlp()

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        result: Tensor = x + self.attn(h, h) + self.mlp(h)
        return result


class Parallel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(ParallelLayer() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return x.mean()


class Towers(nn.Module):
    """Two encoders that meet in a product."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.tokens = nn.Linear(WIDTH, WIDTH), nn.Embedding(20, WIDTH)
        self.vision = nn.ModuleList(Layer() for _ in range(3))
        self.text = nn.ModuleList(Layer() for _ in range(2))

    def forward(self, image: Tensor, ids: Tensor) -> Tensor:
        seen, read = self.patches(image), self.tokens(ids)
        for layer in self.vision:
            seen = layer(seen)
        for layer in self.text:
            read = layer(read)
        result: Tensor = (seen.mean(1) * read.mean(1)).sum(1).mean()
        return result


class EncoderDecoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(20, WIDTH), nn.Linear(WIDTH, 20)
        self.encoder = nn.ModuleList(Layer() for _ in range(2))
        self.decoder = nn.ModuleList(Layer(cross=True) for _ in range(2))

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        memory = self.embed(source)
        for layer in self.encoder:
            memory = layer(memory)
        x = self.embed(target)
        for layer in self.decoder:
            x = layer(x, memory)
        logits: Tensor = self.head(x)
        return logits.logsumexp(-1).mean()


class Siamese(nn.Module):
    """One tower used twice."""

    def __init__(self) -> None:
        super().__init__()
        steps = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)]
        self.tower, self.head = nn.Sequential(*steps), nn.Linear(WIDTH, 1)

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        apart = (self.tower(left) - self.tower(right)).abs()
        result: Tensor = self.head(apart).mean()
        return result


class DenseBlock(nn.Module):
    """Each layer reads what all layers before it made."""

    def __init__(self) -> None:
        super().__init__()
        for i in range(5):
            layer = nn.Sequential(conv(3 + 4 * i, 8), nn.Conv2d(8, 4, 3, padding=1))
            self.add_module(f"denselayer{i + 1}", layer)

    def forward(self, image: Tensor) -> Tensor:
        features = [image]
        for layer in self.children():
            features.append(layer(torch.cat(features, dim=1)))
        return torch.cat(features, dim=1).mean()


class Adapted(nn.Module):
    """A linear layer with a low-rank adapter."""

    def __init__(self, fan_in: int, fan_out: int) -> None:
        super().__init__()
        self.base = nn.Linear(fan_in, fan_out)
        self.a, self.b = nn.Linear(fan_in, 4, bias=False), nn.Linear(4, fan_out, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.base(x) + self.b(self.a(F.dropout(x, 0.0))) * 2.0
        return result


class Functional(nn.Module):
    """No module below it has a forward."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.ParameterList(nn.Parameter(torch.randn(WIDTH, WIDTH)) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for w in self.w:
            x = torch.tanh(x @ w)
        return x.mean()


class Shortcut(nn.Module):
    """A residual block whose shortcut is a convolution, added in place."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.shortcut = conv(3, 4, 3), conv(4, 8)
        last = nn.Sequential(nn.Conv2d(4, 8, 1), nn.BatchNorm2d(8))
        self.main = nn.Sequential(conv(4, 4), conv(4, 4, 3), last)

    def forward(self, image: Tensor) -> Tensor:
        x = self.stem(image)
        y = self.main(x)
        y += self.shortcut(x)
        result: Tensor = y.relu_().mean()
        return result


def example(name: str) -> tuple[nn.Module, tuple[Any, ...]]:
    """A module of this file with random weights, and its inputs for a batch of 2."""
    image, floats = torch.randn(2, 3, 16, 16), torch.randn(2, 5, WIDTH)
    ids = torch.randint(20, (2, 5))
    made: dict[str, tuple[Callable[[], nn.Module], tuple[Any, ...]]] = {
        "inception": (Inception, (image,)),
        "unet": (UNet, (image,)),
        "layers": (lambda: Layers(2), (floats,)),
        "adapters": (lambda: Layers(2, Adapted), (floats,)),
        "parallel": (Parallel, (floats,)),
        "towers": (Towers, (floats, ids)),
        "encoder-decoder": (EncoderDecoder, (ids, ids.flip(1))),
        "siamese": (Siamese, (floats, floats.flip(1))),
        "dense": (DenseBlock, (image,)),
        "functional": (Functional, (floats,)),
        "shortcut": (Shortcut, (image,)),
    }
    make, inputs = made[name]
    return make(), inputs


@functools.cache
def exported(name: str) -> Program:
    """The program of an example."""
    return export_program(*example(name))


EXAMPLES = (
    "inception unet layers adapters parallel towers encoder-decoder siamese dense functional "
    "shortcut"
).split()
