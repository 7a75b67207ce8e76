"""ONNX files for the tests: exported by torch, and written by hand."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import onnx
import torch
from onnx import TensorProto, helper
from torch import Tensor, nn
from torch.nn import functional as F


class ConvNet(nn.Module):
    """Two convolutions with a skip, a pool and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.second = nn.Conv2d(8, 8, 3, padding=1)
        self.head = nn.Linear(8 * 16, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.first(x))
        x = torch.relu(x + self.second(x))
        out: Tensor = self.head(F.max_pool2d(x, 4).flatten(1))
        return out


class Layer(nn.Module):
    """A transformer layer, norms first."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        shape = (batch, length, self.heads, width // self.heads)
        parts = self.qkv(self.before(x)).chunk(3, -1)
        q, k, v = (part.view(shape).transpose(1, 2) for part in parts)
        mixed = F.scaled_dot_product_attention(q, k, v)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        out: Tensor = x + self.down(F.gelu(self.up(self.between(x))))
        return out


class Transformer(nn.Module):
    """Three layers between an embedding and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(50, 32)
        self.layers = nn.ModuleList(Layer(32, 4) for _ in range(3))
        self.head = nn.Linear(32, 50)
        # Exporters merge tensors of equal value: all norms start as ones and zeros.
        for parameter in self.parameters():
            nn.init.normal_(parameter)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.emb(ids)
        for layer in self.layers:
            x = layer(x)
        out: Tensor = self.head(x)
        return out


def export(
    module: nn.Module, example: Tensor, path: Path, dims: dict[int, str], *, legacy: bool = False
) -> Path:
    """Export a module with named dims of its one input."""
    module.eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if legacy:
            torch.onnx.export(
                module,
                (example,),
                path,
                dynamo=False,
                input_names=["x"],
                dynamic_axes={"x": dims},
            )
        else:
            shapes = {dim: torch.export.Dim(name) for dim, name in dims.items()}
            torch.onnx.export(
                module, (example,), path, dynamo=True, dynamic_shapes=(shapes,), verbose=False
            )
    return path


def write(
    path: Path,
    nodes: Sequence[onnx.NodeProto],
    inputs: dict[str, Sequence[int | str]],
    params: dict[str, Sequence[int]],
    outputs: Sequence[str] = ("y",),
    kinds: dict[str, int] | None = None,
) -> Path:
    """Write a graph of nodes by hand; parameters are zeros."""

    def value(name: str, shape: Any) -> onnx.ValueInfoProto:
        kind = (kinds or {}).get(name, TensorProto.FLOAT)
        return helper.make_tensor_value_info(name, kind, shape)

    graph = helper.make_graph(
        list(nodes),
        "tiny",
        [value(name, shape) for name, shape in inputs.items()],
        [value(name, None) for name in outputs],
        [
            helper.make_tensor(name, TensorProto.FLOAT, shape, [0.0] * torch.Size(shape).numel())
            for name, shape in params.items()
        ],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)]), path)
    return path
