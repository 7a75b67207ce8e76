"""Shapes of the library's families, and the models that have a name. Nothing here needs torch.

The fields of a family's class are the arguments that `library.build` takes for it. Lists are
written as text (``"3,4,6,3"``), so that a shape is plain data in a plan file.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Gpt:
    """GPT-2: learned positions, pre-norm, GELU (Radford et al., 2019)."""

    layers: int = 12
    hidden: int = 768
    heads: int = 12
    ffn: int = 3072
    vocab: int = 50257
    seq_len: int = 1024
    tie_embeddings: bool = True
    dropout: float = 0.0


@dataclass(frozen=True)
class Llama:
    """Llama, Mistral and Qwen2: rotary positions, RMS norm, SwiGLU, grouped KV heads.

    `qkv_bias` gives the projections of Qwen2.
    """

    layers: int = 32
    hidden: int = 4096
    heads: int = 32
    kv_heads: int = 32
    ffn: int = 11008
    vocab: int = 32000
    seq_len: int = 4096
    tie_embeddings: bool = False
    qkv_bias: bool = False
    dropout: float = 0.0


@dataclass(frozen=True)
class Mixtral:
    """Mixtral: Llama with a mixture of experts in place of the MLP (Jiang et al., 2024)."""

    layers: int = 32
    hidden: int = 4096
    heads: int = 32
    kv_heads: int = 8
    ffn: int = 14336
    experts: int = 8
    top_k: int = 2
    vocab: int = 32000
    seq_len: int = 4096
    tie_embeddings: bool = False
    dropout: float = 0.0


@dataclass(frozen=True)
class Bert:
    """BERT with its masked-language-model head (Devlin et al., 2019)."""

    layers: int = 12
    hidden: int = 768
    heads: int = 12
    ffn: int = 3072
    vocab: int = 30522
    seq_len: int = 512
    tie_embeddings: bool = True
    dropout: float = 0.0


@dataclass(frozen=True)
class T5:
    """T5 encoder and decoder of `layers` layers each (Raffel et al., 2020)."""

    layers: int = 12
    hidden: int = 768
    heads: int = 12
    head_dim: int = 64
    ffn: int = 3072
    vocab: int = 32128
    seq_len: int = 512
    tie_embeddings: bool = True
    dropout: float = 0.0


@dataclass(frozen=True)
class Vit:
    """Vision transformer with a classifier (Dosovitskiy et al., 2021)."""

    layers: int = 12
    hidden: int = 768
    heads: int = 12
    ffn: int = 3072
    image: int = 224
    patch: int = 16
    classes: int = 1000
    dropout: float = 0.0


@dataclass(frozen=True)
class ResNet:
    """ResNet of bottleneck blocks (He et al., 2016)."""

    depths: str = "3,4,6,3"
    widths: str = "256,512,1024,2048"
    stem: int = 64
    image: int = 224
    classes: int = 1000


@dataclass(frozen=True)
class Dlrm:
    """Recommendation model: embedding bags, bottom MLP, interaction, top MLP (Naumov et al., 2019).

    `bag` is the number of look-ups a sample and table; `bottom` ends at `width` by itself.
    """

    tables: int = 26
    rows: int = 1_000_000
    width: int = 128
    bag: int = 1
    dense: int = 13
    bottom: str = "512,256"
    top: str = "1024,1024,512,256"


Shape = Gpt | Llama | Mixtral | Bert | T5 | Vit | ResNet | Dlrm

FAMILIES: dict[str, type[Shape]] = {
    "gpt": Gpt,
    "llama": Llama,
    "mixtral": Mixtral,
    "bert": Bert,
    "t5": T5,
    "vit": Vit,
    "resnet": ResNet,
    "dlrm": Dlrm,
}

MODELS: dict[str, tuple[str, Shape]] = {
    "gpt2": ("gpt", Gpt()),
    "gpt2-medium": ("gpt", Gpt(24, 1024, 16, 4096)),
    "gpt2-large": ("gpt", Gpt(36, 1280, 20, 5120)),
    "gpt2-xl": ("gpt", Gpt(48, 1600, 25, 6400)),
    "gpt2-demo": ("gpt", Gpt(6, 512, 8, 2048, vocab=8192, seq_len=128)),
    "gpt2-tiny": ("gpt", Gpt(2, 64, 4, 256, vocab=256, seq_len=32)),
    "llama-3-8b": ("llama", Llama(32, 4096, 32, 8, 14336, 128256, 8192)),
    "llama-3-70b": ("llama", Llama(80, 8192, 64, 8, 28672, 128256, 8192)),
    "llama-2-7b": ("llama", Llama()),
    "llama-2-13b": ("llama", Llama(40, 5120, 40, 40, 13824)),
    "llama-2-70b": ("llama", Llama(80, 8192, 64, 8, 28672)),
    "mistral-7b": ("llama", Llama(32, 4096, 32, 8, 14336, 32768)),
    "qwen2-1.5b": ("llama", Llama(28, 1536, 12, 2, 8960, 151936, 4096, True, True)),
    "llama-demo": ("llama", Llama(6, 512, 8, 4, 1536, 8192, 128)),
    "llama-tiny": ("llama", Llama(2, 64, 4, 2, 128, 256, 32)),
    "mixtral-8x7b": ("mixtral", Mixtral()),
    "mixtral-tiny": ("mixtral", Mixtral(2, 64, 4, 2, 128, 4, 2, 256, 32)),
    "bert-base": ("bert", Bert()),
    "bert-large": ("bert", Bert(24, 1024, 16, 4096)),
    "bert-tiny": ("bert", Bert(2, 64, 4, 256, 256, 32)),
    "t5-large": ("t5", T5(24, 1024, 16, 64, 4096)),
    "t5-tiny": ("t5", T5(2, 64, 4, 16, 128, 256, 32)),
    "vit-large": ("vit", Vit(24, 1024, 16, 4096)),
    "vit-huge": ("vit", Vit(32, 1280, 16, 5120, patch=14)),
    "vit-tiny": ("vit", Vit(2, 64, 4, 128, image=32, patch=8, classes=10)),
    "resnet-50": ("resnet", ResNet()),
    "resnet-tiny": ("resnet", ResNet("1,2", "32,64", stem=16, image=32, classes=10)),
    "dlrm": ("dlrm", Dlrm()),
    "dlrm-tiny": ("dlrm", Dlrm(4, 100, 16, 2, 8, "32", "32,16")),
}
