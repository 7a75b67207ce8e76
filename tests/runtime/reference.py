"""What one process computes of a small model: losses, gradients, weights and buffers."""

from __future__ import annotations

import contextlib
import functools

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from rlplace.graph.library import Argument, build, spec
from rlplace.graph.types import OpGraph
from rlplace.runtime.model import cast

LAYERS = {"layers": 2, "hidden": 32, "heads": 4, "ffn": 64, "vocab": 96, "seq_len": 12}
MODELS: dict[str, tuple[str, dict[str, Argument]]] = {
    "gpt": ("gpt", {**LAYERS}),
    "gpt-untied": ("gpt", {**LAYERS, "tie_embeddings": False}),
    "gpt-dropout": ("gpt", {**LAYERS, "tie_embeddings": False, "dropout": 0.1}),
    "llama": ("llama", {**LAYERS, "kv_heads": 2}),
    "llama-wide": ("llama", {**LAYERS, "heads": 8, "kv_heads": 4}),
    "qwen": ("llama", {**LAYERS, "kv_heads": 2, "tie_embeddings": True, "qkv_bias": True}),
    "bert": ("bert", {**LAYERS}),
    "mixtral": ("mixtral", {**LAYERS, "layers": 1, "kv_heads": 4, "seq_len": 8}),
    "resnet": ("resnet", {"depths": "1,1", "widths": "16,32", "stem": 8, "image": 32}),
    "t5": ("t5", {**LAYERS, "head_dim": 8}),
    "unet": ("unet-tiny", {}),
    "dlrm": ("dlrm-tiny", {}),
    "whisper": ("whisper-tiny", {}),
    "gcn": ("gcn-tiny", {}),
}

#: Their casts to float32 leave gradients that AdamW would divide by hardly more than rounding.
STEPPED_BY_SGD = ("llama-wide", "mixtral")

#: Models whose samples see each other (batch norm), so that it matters who is in a micro-batch.
COUPLED = ("resnet",)


@functools.cache
def graph_of(model: str) -> OpGraph:
    name, args = MODELS[model]
    return build(name, **args)  # type: ignore[arg-type]  # a dict has one type of values


@functools.cache
def expected(
    model: str,
    runs: tuple[tuple[int, int], ...],
    steps: int,
    attention: str = "flash",
    clip: float | None = None,
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses, and gradients, weights and buffers after some steps, in float64.

    Args:
        model: Key of `MODELS`.
        runs: Rows of the batch that are taken at a time, one behind the other; to the last.
        steps: Steps; step i takes the data of seed i.
        attention: As in a plan.
        clip: Largest norm of the gradients, which must be larger without.
    """
    name, args = MODELS[model]
    wanted = spec(name, **args)  # type: ignore[arg-type]  # a dict has one type of values
    torch.manual_seed(0)
    module = wanted.make().train().to(torch.float64)
    kind = torch.optim.SGD if model in STEPPED_BY_SGD else torch.optim.AdamW
    optimizer = kind(module.parameters(), lr=1e-3, fused=True)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        data = cast(wanted.example(runs[-1][1], step), torch.float64)
        assert isinstance(data, dict)
        total = 0.0
        for start, stop in runs:
            part = {key: value[start:stop] for key, value in data.items()}
            with _kernel(attention):
                loss = module(**part) * ((stop - start) / runs[-1][1])
                loss.backward()
            total += float(loss.detach())
        if clip is not None:
            assert torch.nn.utils.clip_grad_norm_(module.parameters(), clip) > clip
        optimizer.step()
        losses.append(total)
    tensors = {f"weight/{key}": value.detach() for key, value in module.named_parameters()}
    if model in COUPLED:
        tensors |= {f"buffer/{key}": value for key, value in module.named_buffers()}
    for key, value in module.named_parameters():
        if value.grad is not None:
            tensors[f"gradient/{key}"] = value.grad
    return losses, tensors


def even(samples: int, parts: int) -> tuple[tuple[int, int], ...]:
    """Runs of rows of equal size."""
    size = samples // parts
    return tuple((start, start + size) for start in range(0, samples, size))


def _kernel(attention: str) -> contextlib.AbstractContextManager[None]:
    return sdpa_kernel(SDPBackend.MATH) if attention == "math" else contextlib.nullcontext()
