"""What each family is given: its keyword inputs as plain data, without torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rlplace.graph.models.shapes import (
    T5,
    Clip,
    Dlrm,
    Gcn,
    Llava,
    ResNet,
    Shape,
    Swin,
    Unet,
    Vit,
    Whisper,
)


@dataclass(frozen=True)
class Input:
    """One keyword input of a model.

    Args:
        size: Its dims after the batch.
        below: Ids are drawn from [0, below); 0 for normal floating-point numbers.
        copies: Input that this one is a copy of; then `below` draws nothing.
        shift: Places that the copy is rolled to the right along dim 1.
        cast: ``float`` where drawn ids are given as floating-point numbers.
    """

    size: tuple[int, ...] = ()
    below: int = 0
    copies: str = ""
    shift: int = 0
    cast: Literal["", "float"] = ""


def inputs_of(shape: Shape) -> dict[str, Input]:
    """The keyword inputs of a model, labels included, in the order in which they are drawn."""
    match shape:
        case T5():
            ids = Input((shape.seq_len,), shape.vocab)
            return {"input_ids": ids, "labels": ids, "decoder_input_ids": _shifted(ids)}
        case Vit() | Swin() | ResNet():
            return {"pixel_values": _pixels(shape.image), "labels": Input((), shape.classes)}
        case Unet():
            latent = Input((shape.channels, shape.image, shape.image))
            context = Input((shape.context_len, shape.context))
            return {
                "latents": latent,
                "noise": latent,
                "timesteps": Input((), 1000),
                "context": context,
            }
        case Gcn():
            return {
                "features": Input((shape.nodes, shape.features)),
                "edges": Input((shape.edges, 2), shape.nodes),
                "labels": Input((shape.nodes,), shape.classes),
            }
        case Dlrm():
            indices = Input((shape.tables, shape.bag), shape.rows)
            labels = Input((), 2, cast="float")
            return {"dense": Input((shape.dense,)), "indices": indices, "labels": labels}
        case Whisper():
            ids = Input((shape.seq_len,), shape.vocab)
            sound = Input((shape.mels, 2 * shape.frames))
            return {"input_features": sound, "labels": ids, "decoder_input_ids": _shifted(ids)}
        case Clip():
            ids = Input((shape.seq_len,), shape.vocab)
            return {"pixel_values": _pixels(shape.image), "input_ids": ids}
        case Llava():
            return {"pixel_values": _pixels(shape.image), **_tokens(shape.vocab, shape.seq_len)}
        case _:
            return _tokens(shape.vocab, shape.seq_len)


def _tokens(vocab: int, length: int) -> dict[str, Input]:
    ids = Input((length,), vocab)
    return {"input_ids": ids, "labels": Input(ids.size, copies="input_ids")}


def _shifted(ids: Input) -> Input:
    return Input(ids.size, copies="labels", shift=1)


def _pixels(side: int) -> Input:
    return Input((3, side, side))
