"""The library's transformers and CNN: real modules from transformers' configs, random weights.

Each module takes keyword tensors and returns its loss, the mean over the samples, so that the
mean over equal micro-batches is exact.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn

from rlplace.errors import MissingExtraError
from rlplace.graph.models import experts
from rlplace.graph.models.shapes import T5, Bert, Gpt, Llama, Mixtral, ResNet, Vit

#: The name under which sdpa is registered once more. An attention without a mask function gets no
#: mask, and then sdpa is told `is_causal`: without padding that is the same, and unlike with a mask
#: tensor, flash kernels and grouped KV heads are possible.
_ATTENTION = "rlplace_sdpa"


class TokenLoss(nn.Module):
    """A language model that returns its cross entropy over all tokens."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        """Loss of ids and labels, both (batch, length)."""
        loss: Tensor = self.model(input_ids=input_ids, labels=labels).loss
        return loss


class PairLoss(nn.Module):
    """An encoder-decoder that returns its cross entropy over all target tokens."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, decoder_input_ids: Tensor, labels: Tensor) -> Tensor:
        """Loss of source ids, shifted target ids and labels, all (batch, length)."""
        out = self.model(input_ids=input_ids, decoder_input_ids=decoder_input_ids, labels=labels)
        loss: Tensor = out.loss
        return loss


class ImageLoss(nn.Module):
    """A classifier of images that returns its cross entropy."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, pixel_values: Tensor, labels: Tensor) -> Tensor:
        """Loss of pixels (batch, 3, height, width) and labels (batch,)."""
        loss: Tensor = self.model(pixel_values=pixel_values, labels=labels).loss
        return loss


def make_gpt(shape: Gpt) -> nn.Module:
    """GPT-2 with a language-model head."""
    config = {
        "n_layer": shape.layers,
        "n_embd": shape.hidden,
        "n_head": shape.heads,
        "n_inner": shape.ffn,
        "n_positions": shape.seq_len,
        "attn_pdrop": shape.dropout,
        "resid_pdrop": shape.dropout,
        "embd_pdrop": shape.dropout,
    }
    model: Any = _make("GPT2", "GPT2LMHeadModel", _decoder(shape) | config)
    model.loss_type = "ForCausalLM"  # else it logs that it has to guess
    return TokenLoss(model)


def make_llama(shape: Llama) -> nn.Module:
    """Llama, or Qwen2 where the projections of q, k and v have a bias."""
    config = _decoder(shape) | _llama(shape)
    if shape.qkv_bias:
        return TokenLoss(_make("Qwen2", "Qwen2ForCausalLM", config))
    return TokenLoss(_make("Llama", "LlamaForCausalLM", config))


def make_mixtral(shape: Mixtral) -> nn.Module:
    """Mixtral; its experts are one grouped matmul, so only the chosen tokens are computed."""
    config = {"num_local_experts": shape.experts, "num_experts_per_tok": shape.top_k}
    config |= _decoder(shape) | _llama(shape)
    model: Any = _make("Mixtral", "MixtralForCausalLM", config)
    from transformers.integrations.moe import ExpertsInterface

    ExpertsInterface.register(experts.NAME, experts.grouped_experts)
    model.set_experts_implementation(experts.NAME)
    return TokenLoss(model)


def make_bert(shape: Bert) -> nn.Module:
    """BERT with its masked-language-model head."""
    config = {
        "num_hidden_layers": shape.layers,
        "hidden_size": shape.hidden,
        "num_attention_heads": shape.heads,
        "intermediate_size": shape.ffn,
        "max_position_embeddings": shape.seq_len,
        "vocab_size": shape.vocab,
        "tie_word_embeddings": shape.tie_embeddings,
        "hidden_dropout_prob": shape.dropout,
        "attention_probs_dropout_prob": shape.dropout,
        "pad_token_id": 0,
    }
    return TokenLoss(_make("Bert", "BertForMaskedLM", config))


def make_t5(shape: T5) -> nn.Module:
    """T5 with a language-model head."""
    config = {
        "num_layers": shape.layers,
        "d_model": shape.hidden,
        "num_heads": shape.heads,
        "d_kv": shape.head_dim,
        "d_ff": shape.ffn,
        "vocab_size": shape.vocab,
        "tie_word_embeddings": shape.tie_embeddings,
        "dropout_rate": shape.dropout,
        "decoder_start_token_id": 0,
        "pad_token_id": 0,
        "eos_token_id": 1,
        "use_cache": False,
    }
    return PairLoss(_make("T5", "T5ForConditionalGeneration", config))


def make_vit(shape: Vit) -> nn.Module:
    """A vision transformer with a classifier."""
    config = {
        "num_hidden_layers": shape.layers,
        "hidden_size": shape.hidden,
        "num_attention_heads": shape.heads,
        "intermediate_size": shape.ffn,
        "image_size": shape.image,
        "patch_size": shape.patch,
        "num_labels": shape.classes,
        "hidden_dropout_prob": shape.dropout,
        "attention_probs_dropout_prob": shape.dropout,
    }
    return ImageLoss(_make("ViT", "ViTForImageClassification", config))


def make_resnet(shape: ResNet) -> nn.Module:
    """A ResNet with a classifier."""
    config = {
        "embedding_size": shape.stem,
        "hidden_sizes": [int(width) for width in shape.widths.split(",")],
        "depths": [int(depth) for depth in shape.depths.split(",")],
        "num_labels": shape.classes,
    }
    return ImageLoss(_make("ResNet", "ResNetForImageClassification", config, attends=False))


def _decoder(shape: Gpt | Llama | Mixtral) -> dict[str, Any]:
    return {
        "vocab_size": shape.vocab,
        "tie_word_embeddings": shape.tie_embeddings,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": None,
        "use_cache": False,
    }


def _llama(shape: Llama | Mixtral) -> dict[str, Any]:
    return {
        "num_hidden_layers": shape.layers,
        "hidden_size": shape.hidden,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "intermediate_size": shape.ffn,
        "max_position_embeddings": shape.seq_len,
        "attention_dropout": shape.dropout,
    }


def _make(family: str, model: str, config: dict[str, Any], attends: bool = True) -> nn.Module:
    try:
        import transformers
        from transformers.integrations.sdpa_attention import sdpa_attention_forward
    except ImportError as error:
        rule = "the models of the library need transformers: pip install rlplace[models]"
        raise MissingExtraError(rule) from error
    if attends:
        config = config | {"attn_implementation": _ATTENTION}
        transformers.AttentionInterface.register(_ATTENTION, sdpa_attention_forward)
    with _quiet(transformers.logging):
        made = getattr(transformers, f"{family}Config")(**config)
        build: Callable[[Any], nn.Module] = getattr(transformers, model)
        return build(made).train()


@contextlib.contextmanager
def _quiet(logging: Any) -> Iterator[None]:
    """Without transformers' remarks about configs; the level is put back."""
    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)
