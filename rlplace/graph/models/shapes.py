"""Shapes of the library's families. Nothing here needs torch.

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
class Swin:
    """Swin transformer with a classifier (Liu et al., 2021): attention in shifted windows.

    `width` is that of the first stage; each next stage has half the side and twice the width.
    """

    depths: str = "2,2,18,2"
    heads: str = "4,8,16,32"
    width: int = 128
    window: int = 7
    ratio: int = 4
    image: int = 224
    patch: int = 4
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
class Unet:
    """Latent diffusion's UNet with a text context (Rombach et al., 2022), on noise prediction.

    One number a level of resolution: `widths` (channels), `transformers` (blocks of self- and
    cross-attention after each residual block, 0 for none) and `heads`; `middle` is the number of
    transformer blocks between the way down and the way up. `image` is the side of the latent.
    """

    widths: str = "320,640,1280,1280"
    transformers: str = "1,1,1,0"
    heads: str = "8,8,8,8"
    middle: int = 1
    blocks: int = 2
    norm_groups: int = 32
    context: int = 768
    context_len: int = 77
    channels: int = 4
    image: int = 64


@dataclass(frozen=True)
class Gcn:
    """Graph convolutions (Kipf and Welling, 2017), or graph attention (Velickovic et al., 2018).

    A sample is one graph of `nodes` nodes and `edges` directed edges without self-loops, which
    the model adds; every node has a label. With `attention` a hidden layer has `heads` heads of
    `hidden` / `heads` features each and the last layer one head. `batch_norm` stands between the
    layers, as in the baselines of OGB.
    """

    layers: int = 2
    features: int = 1433
    hidden: int = 16
    classes: int = 7
    nodes: int = 2708
    edges: int = 10556
    attention: bool = False
    heads: int = 1
    batch_norm: bool = False
    dropout: float = 0.0


@dataclass(frozen=True)
class Whisper:
    """Speech to text (Radford et al., 2022): two 1-d convolutions and an encoder, a decoder.

    `mels` is the number of mel bins, `frames` the length of the encoder (half as many frames as
    come in); the encoder's sinusoidal positions are frozen.
    """

    layers: int = 12
    hidden: int = 768
    heads: int = 12
    ffn: int = 3072
    mels: int = 80
    frames: int = 1500
    vocab: int = 51865
    seq_len: int = 448
    dropout: float = 0.0


@dataclass(frozen=True)
class Clip:
    """Two towers, image and text, that meet in a contrastive loss (Radford et al., 2021).

    The negatives are a queue of `queue` earlier embeddings of each kind (He et al., 2020; Li et
    al., 2021), not the rest of the batch: so the loss is a mean over samples and micro-batches
    are exact.
    """

    layers: int = 12
    hidden: int = 768
    heads: int = 12
    ffn: int = 3072
    image: int = 224
    patch: int = 32
    text_layers: int = 12
    text_hidden: int = 512
    text_heads: int = 8
    text_ffn: int = 2048
    vocab: int = 49408
    seq_len: int = 77
    width: int = 512
    queue: int = 32768


@dataclass(frozen=True)
class Llava:
    """A language model that sees (Liu et al., 2023): vision tower, two-layer projector, Llama.

    The projected patches stand before the tokens. `freeze_vision` trains the tower not, as the
    authors do. `seq_len` counts the text alone.
    """

    layers: int = 32
    hidden: int = 4096
    heads: int = 32
    kv_heads: int = 32
    ffn: int = 11008
    vocab: int = 32064
    seq_len: int = 2048
    vision_layers: int = 23
    vision_hidden: int = 1024
    vision_heads: int = 16
    vision_ffn: int = 4096
    image: int = 336
    patch: int = 14
    freeze_vision: bool = True


@dataclass(frozen=True)
class Lstm:
    """A recurrent language model (Zaremba et al., 2014): embedding, LSTM layers, head."""

    layers: int = 2
    width: int = 1500
    hidden: int = 1500
    vocab: int = 10000
    seq_len: int = 35
    tie_embeddings: bool = False
    dropout: float = 0.0


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


Shape = (
    Gpt
    | Llama
    | Mixtral
    | Bert
    | T5
    | Vit
    | Swin
    | ResNet
    | Unet
    | Gcn
    | Dlrm
    | Whisper
    | Clip
    | Llava
    | Lstm
)

FAMILIES: dict[str, type[Shape]] = {
    "gpt": Gpt,
    "llama": Llama,
    "mixtral": Mixtral,
    "bert": Bert,
    "t5": T5,
    "vit": Vit,
    "swin": Swin,
    "resnet": ResNet,
    "unet": Unet,
    "gcn": Gcn,
    "dlrm": Dlrm,
    "whisper": Whisper,
    "clip": Clip,
    "llava": Llava,
    "lstm": Lstm,
}


def numbers(text: str) -> list[int]:
    """The list that a field holds as text."""
    return [int(part) for part in text.split(",")]
