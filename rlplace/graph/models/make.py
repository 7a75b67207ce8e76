"""From a shape to its module and to random data for it."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from rlplace.graph.models import dlrm, gnn, lstm, towers, transformer, unet, vision
from rlplace.graph.models.inputs import Input, inputs_of
from rlplace.graph.models.shapes import (
    T5,
    Bert,
    Clip,
    Dlrm,
    Gcn,
    Gpt,
    Llama,
    Llava,
    Lstm,
    Mixtral,
    ResNet,
    Shape,
    Swin,
    Unet,
    Vit,
    Whisper,
)


def make(shape: Shape) -> nn.Module:  # noqa: C901 - one line a family
    """A module of a shape, in training mode, on torch's default device.

    Raises:
        MissingExtraError: If transformers is needed and not installed.
    """
    match shape:
        case Gpt():
            return transformer.make_gpt(shape)
        case Llama():
            return transformer.make_llama(shape)
        case Mixtral():
            return transformer.make_mixtral(shape)
        case Bert():
            return transformer.make_bert(shape)
        case T5():
            return transformer.make_t5(shape)
        case Whisper():
            return transformer.make_whisper(shape)
        case Vit():
            return vision.make_vit(shape)
        case Swin():
            return vision.make_swin(shape)
        case ResNet():
            return vision.make_resnet(shape)
        case Clip():
            return towers.make_clip(shape)
        case Llava():
            return towers.make_llava(shape)
        case Unet():
            return unet.UnetLoss(shape)
        case Gcn():
            return gnn.GraphLoss(shape)
        case Lstm():
            return lstm.LstmLoss(shape)
        case Dlrm():
            return dlrm.DlrmLoss(shape)


def draw(shape: Shape, batch: int, seed: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """Random keyword inputs on the CPU; normal numbers are drawn in fp32 and then cast."""
    generator = torch.Generator().manual_seed(seed)
    made: dict[str, Tensor] = {}
    for name, given in inputs_of(shape).items():
        size = (batch, *given.size)
        if given.copies:
            source = made[given.copies]
            made[name] = source.roll(given.shift, dims=1) if given.shift else source.clone()
        elif given.below:
            ids = torch.randint(0, given.below, size, generator=generator)
            made[name] = ids.to(dtype) if given.cast else ids
        else:
            made[name] = torch.randn(size, generator=generator).to(dtype)
    return made


def empty(shape: Shape, batch: int) -> dict[str, Tensor]:
    """The same inputs on the meta device, in fp32."""

    def dtype(given: Input) -> torch.dtype:
        is_float = given.cast or not (given.below or given.copies)
        return torch.float32 if is_float else torch.long

    inputs = inputs_of(shape).items()
    return {
        name: torch.empty(batch, *given.size, dtype=dtype(given), device="meta")
        for name, given in inputs
    }
