"""The library's models of tokens: real modules from transformers' configs, random weights.

Each module takes keyword tensors and returns its loss, the mean over the samples, so that the
mean over equal micro-batches is exact.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from rlplace.graph.models import experts
from rlplace.graph.models.hub import from_hub
from rlplace.graph.models.shapes import T5, Bert, Gpt, Llama, Mixtral, Whisper


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


class SpeechLoss(nn.Module):
    """Speech to text that returns its cross entropy over all target tokens."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_features: Tensor, decoder_input_ids: Tensor, labels: Tensor) -> Tensor:
        """Loss of sound (batch, mels, 2 * frames), shifted ids and labels (batch, length)."""
        sound = {"input_features": input_features, "decoder_input_ids": decoder_input_ids}
        loss: Tensor = self.model(**sound, labels=labels).loss
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
        # The same function as GPT-2's own (tanh, written out), in one op that saves its input.
        "activation_function": "gelu_pytorch_tanh",
    }
    model: Any = from_hub("GPT2", "GPT2LMHeadModel", _decoder(shape) | config)
    model.loss_type = "ForCausalLM"  # else it logs that it has to guess
    return TokenLoss(model)


def make_llama(shape: Llama) -> nn.Module:
    """Llama, or Qwen2 where the projections of q, k and v have a bias."""
    config = _decoder(shape) | _llama(shape)
    if shape.qkv_bias:
        return TokenLoss(from_hub("Qwen2", "Qwen2ForCausalLM", config))
    return TokenLoss(from_hub("Llama", "LlamaForCausalLM", config))


def make_mixtral(shape: Mixtral) -> nn.Module:
    """Mixtral; its experts are one grouped matmul, so only the chosen tokens are computed."""
    config = {"num_local_experts": shape.experts, "num_experts_per_tok": shape.top_k}
    config |= _decoder(shape) | _llama(shape)
    model: Any = from_hub("Mixtral", "MixtralForCausalLM", config)
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
    return TokenLoss(from_hub("Bert", "BertForMaskedLM", config))


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
    return PairLoss(from_hub("T5", "T5ForConditionalGeneration", config))


def make_whisper(shape: Whisper) -> nn.Module:
    """Whisper: convolutions over time, an encoder, and a decoder with a language-model head."""
    config = {
        "vocab_size": shape.vocab,
        "num_mel_bins": shape.mels,
        "d_model": shape.hidden,
        "max_source_positions": shape.frames,
        "max_target_positions": shape.seq_len,
        "dropout": shape.dropout,
        "use_cache": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 0,
        "decoder_start_token_id": 0,
    }
    for side in ("encoder", "decoder"):
        config |= {
            f"{side}_layers": shape.layers,
            f"{side}_attention_heads": shape.heads,
            f"{side}_ffn_dim": shape.ffn,
        }
    return SpeechLoss(from_hub("Whisper", "WhisperForConditionalGeneration", config))


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
