"""Tiny models of each family, cut into groups with values to run them on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    ResNetConfig,
    ResNetForImageClassification,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTForImageClassification,
)

from rlplace.graph.coarsen import coarsen
from rlplace.graph.program import Piece, Program, export_program, extract
from rlplace.graph.tape import Role

VOCAB, LENGTH = 256, 16


class _TextLoss(nn.Module):
    """A language model of the transformers library that returns its loss alone."""

    def __init__(self, model: nn.Module, **options: bool) -> None:
        super().__init__()
        self.model = model
        self.options = options

    def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
        return self.model(input_ids=input_ids, labels=labels, **self.options).loss


class _ImageLoss(nn.Module):
    """An image classifier of the transformers library that returns its loss alone."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, pixel_values: Tensor, labels: Tensor) -> Any:
        return self.model(pixel_values=pixel_values, labels=labels).loss


def _text(model: nn.Module, **options: bool) -> tuple[nn.Module, dict[str, Tensor]]:
    ids = torch.randint(0, VOCAB, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    return _TextLoss(model, **options), {"input_ids": ids, "labels": ids.clone()}


def _image(
    model: nn.Module, height: int = 32, width: int = 32
) -> tuple[nn.Module, dict[str, Tensor]]:
    draw = torch.Generator().manual_seed(1)
    pixels = torch.randn(2, 3, height, width, generator=draw)
    return _ImageLoss(model), {"pixel_values": pixels, "labels": torch.tensor([1, 3])}


def _options(family: str) -> dict[str, Any]:
    """Sizes of a tiny model: 8 heads, 4 of keys where they are grouped, and no dropout."""
    text = {"vocab_size": VOCAB, "bos_token_id": 0, "eos_token_id": 1}
    drops = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    size = {"hidden_size": 64, "num_attention_heads": 8, "intermediate_size": 128}
    size |= {"num_hidden_layers": 1}
    if family.startswith("llama"):
        tied = {"tie_word_embeddings": family == "llama-tied"}
        return {"num_key_value_heads": 4, **tied, **size, **text}
    if family == "gpt2":
        drops = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
        return {"n_layer": 2, "n_embd": 64, "n_head": 8, "n_positions": LENGTH, **drops, **text}
    if family == "bert":
        return {"vocab_size": VOCAB, **size, **drops}
    if family == "t5":
        size = {"d_model": 64, "d_ff": 128, "d_kv": 8, "num_layers": 2, "num_heads": 8}
        start = {"decoder_start_token_id": 0, "vocab_size": VOCAB}
        return {"dropout_rate": 0.0, **size, **start}
    if family == "vit":
        # 15 patches and the class token: a length that 2 and 4 divide.
        return {"image_size": (24, 40), "patch_size": 8, "num_labels": 8, **size, **drops}
    return {"embedding_size": 16, "hidden_sizes": [16, 32], "depths": [1, 2], "num_labels": 8}


def build(family: str) -> tuple[nn.Module, dict[str, Tensor]]:
    """A tiny model without dropout, in training mode, and its inputs."""
    torch.manual_seed(0)
    options = _options(family)
    if family.startswith("llama"):
        return _text(LlamaForCausalLM(LlamaConfig(**options)), use_cache=False)
    if family == "gpt2":
        return _text(GPT2LMHeadModel(GPT2Config(**options)), use_cache=False)
    if family == "bert":
        return _text(BertForMaskedLM(BertConfig(**options)))
    if family == "t5":
        return _text(T5ForConditionalGeneration(T5Config(**options)), use_cache=False)
    if family == "vit":
        return _image(ViTForImageClassification(ViTConfig(**options)), 24, 40)
    return _image(ResNetForImageClassification(ResNetConfig(**options)))


FAMILIES = ("gpt2", "llama", "llama-tied", "bert", "t5", "vit", "resnet")


@dataclass(frozen=True)
class Sample:
    """A group as a piece, what the search is told of it, and values to run it on.

    `meta` is the same piece for the meta device; `tied` are states that other groups use too.
    """

    name: str
    piece: Piece
    meta: Piece
    roles: list[Role]
    grads: frozenset[str]
    tied: frozenset[str]
    inputs: list[Any]


def program_of(family: str) -> tuple[Program, nn.Module, dict[str, Tensor]]:
    """The exported model."""
    model, inputs = build(family)
    model.train()
    return export_program(model, (), inputs), model, inputs


def samples(family: str) -> Iterator[Sample]:
    """The groups of a family, with the values that they get in a forward pass."""
    program, model, inputs = program_of(family)
    values = _values(program, model, inputs)
    parts = coarsen(program)
    groups = [extract(program, names, device="cpu") for names in parts]
    uses = [name for piece in groups for name in dict.fromkeys(name for _, name in piece.states)]
    tied = frozenset(name for name in uses if uses.count(name) > 1)
    params = set(program.exported.graph_signature.inputs_to_parameters)
    for names, piece in zip(parts, groups, strict=True):
        places = [*(place for place, _ in piece.states), *piece.inputs, *piece.reads]
        roles: list[Role] = [
            "param"
            if place in params
            else "buffer"
            if place in program.states
            else "constant"
            if place in program.inputs or place in program.prologue
            else "activation"
            for place in places
        ]
        grads = {
            p for p, role in zip(places, roles, strict=True) if role in ("param", "activation")
        }
        grads = {p for p in grads if _is_float(values[p])}
        given = [
            values[p].detach().clone().requires_grad_(p in grads)
            if isinstance(values[p], Tensor)
            else values[p]
            for p in places
        ]
        title = f"{family}: {names[-1]}"
        meta = extract(program, names)
        yield Sample(title, piece, meta, roles, frozenset(grads), tied, given)


def _is_float(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _values(program: Program, model: nn.Module, inputs: dict[str, Tensor]) -> dict[str, Any]:
    """Value of every state, input and node of a forward pass."""
    state = {k: v for k, v in program.exported.constants.items() if isinstance(v, Tensor)}
    state |= {**dict(model.named_parameters()), **dict(model.named_buffers())}
    values: dict[str, Any] = {place: state[name] for place, name in program.states.items()}
    values |= dict(zip(program.inputs, program.unflatten((), inputs), strict=True))
    kept = [
        node.name for node in program.nodes if not isinstance(node.meta.get("val"), list | tuple)
    ]
    whole = extract(program, [node.name for node in program.nodes], writes=kept, device="cpu")
    places = [*(place for place, _ in whole.states), *whole.inputs]
    copies = [values[place].detach().clone() for place in places]
    return values | dict(zip(kept, whole.module(*copies), strict=True))
