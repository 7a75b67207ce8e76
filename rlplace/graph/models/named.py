"""The models that have a name, with the sizes of their published configurations.

Names that end in ``-tiny`` are of a size for tests, whatever else goes by such a name; ``-demo``
trains on a CPU. Sizes are those of the papers and of the configs published with the weights
(``config.json`` on the model hub); what differs from the published model is said beside it.
"""

from __future__ import annotations

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

_GPT: dict[str, Gpt] = {
    "gpt2": Gpt(),
    "gpt2-medium": Gpt(24, 1024, 16, 4096),
    "gpt2-large": Gpt(36, 1280, 20, 5120),
    "gpt2-xl": Gpt(48, 1600, 25, 6400),
    # Table 2.1 of Brown et al., 2020; every layer attends densely here, every second one there.
    "gpt3-13b": Gpt(40, 5120, 40, 20480, seq_len=2048),
    "gpt3-175b": Gpt(96, 12288, 96, 49152, seq_len=2048),
    "gpt2-demo": Gpt(6, 512, 8, 2048, vocab=8192, seq_len=128),
    "gpt2-tiny": Gpt(2, 64, 4, 256, vocab=256, seq_len=32),
}

_LLAMA: dict[str, Llama] = {
    "llama-3-8b": Llama(32, 4096, 32, 8, 14336, 128256, 8192),
    "llama-3-70b": Llama(80, 8192, 64, 8, 28672, 128256, 8192),
    "llama-3-405b": Llama(126, 16384, 128, 8, 53248, 128256, 8192),
    "llama-3.2-1b": Llama(16, 2048, 32, 8, 8192, 128256, 8192, tie_embeddings=True),
    "llama-3.2-3b": Llama(28, 3072, 24, 8, 8192, 128256, 8192, tie_embeddings=True),
    "llama-2-7b": Llama(),
    "llama-2-13b": Llama(40, 5120, 40, 40, 13824),
    "llama-2-70b": Llama(80, 8192, 64, 8, 28672),
    "mistral-7b": Llama(32, 4096, 32, 8, 14336, 32768),
    "qwen2-1.5b": Llama(28, 1536, 12, 2, 8960, 151936, 4096, True, True),
    "qwen2-7b": Llama(28, 3584, 28, 4, 18944, 152064, 4096, qkv_bias=True),
    "qwen2-72b": Llama(80, 8192, 64, 8, 29568, 152064, 4096, qkv_bias=True),
    "llama-demo": Llama(6, 512, 8, 4, 1536, 8192, 128),
    "llama-tiny": Llama(2, 64, 4, 2, 128, 256, 32),
}

_TEXT: dict[str, tuple[str, Shape]] = {
    "mixtral-8x7b": ("mixtral", Mixtral()),
    "mixtral-8x22b": ("mixtral", Mixtral(56, 6144, 48, 8, 16384)),
    "mixtral-tiny": ("mixtral", Mixtral(2, 64, 4, 2, 128, 4, 2, 256, 32)),
    "bert-base": ("bert", Bert()),
    "bert-large": ("bert", Bert(24, 1024, 16, 4096)),
    "bert-tiny": ("bert", Bert(2, 64, 4, 256, 256, 32)),
    "t5-base": ("t5", T5()),
    "t5-large": ("t5", T5(24, 1024, 16, 64, 4096)),
    "t5-3b": ("t5", T5(24, 1024, 32, 128, 16384)),
    "t5-11b": ("t5", T5(24, 1024, 128, 128, 65536)),
    "t5-tiny": ("t5", T5(2, 64, 4, 16, 128, 256, 32)),
    # The large model of Zaremba et al., 2014, on the Penn Treebank.
    "lstm-ptb-large": ("lstm", Lstm()),
    "lstm-tiny": ("lstm", Lstm(2, 32, 48, 256, 6)),
}

_IMAGES: dict[str, tuple[str, Shape]] = {
    "vit-base": ("vit", Vit()),
    "vit-large": ("vit", Vit(24, 1024, 16, 4096)),
    "vit-huge": ("vit", Vit(32, 1280, 16, 5120, patch=14)),
    "vit-tiny": ("vit", Vit(2, 64, 4, 128, image=32, patch=8, classes=10)),
    # Section 3.3 of Liu et al., 2021: Swin-T, -S, -B and -L.
    "swin-t": ("swin", Swin("2,2,6,2", "3,6,12,24", 96)),
    "swin-small": ("swin", Swin("2,2,18,2", "3,6,12,24", 96)),
    "swin-base": ("swin", Swin()),
    "swin-large": ("swin", Swin("2,2,18,2", "6,12,24,48", 192)),
    "swin-tiny": ("swin", Swin("2,2", "2,4", 16, window=4, ratio=2, image=32, classes=10)),
    "resnet-50": ("resnet", ResNet()),
    "resnet-101": ("resnet", ResNet("3,4,23,3")),
    "resnet-152": ("resnet", ResNet("3,8,36,3")),
    "resnet-tiny": ("resnet", ResNet("1,2", "32,64", stem=16, image=32, classes=10)),
    # The UNets of Stable Diffusion 1.5, 2.1 and XL, from unet/config.json; that of XL without the
    # embedding of its pooled text and sizes (5 of its 2,567 million parameters).
    "sd-1.5-unet": ("unet", Unet()),
    "sd-2.1-unet": ("unet", Unet(heads="5,10,20,20", context=1024, image=96)),
    "sdxl-unet": (
        "unet",
        Unet("320,640,1280", "0,2,10", "5,10,20", middle=10, context=2048, image=128),
    ),
    "unet-tiny": ("unet", Unet("16,32", "0,1", "2,4", 1, 1, 4, 24, 6, 4, 8)),
}

_OTHERS: dict[str, tuple[str, Shape]] = {
    "gcn-cora": ("gcn", Gcn()),
    "gat-cora": ("gcn", Gcn(hidden=64, attention=True, heads=8)),
    # The GCN baseline of ogbn-arxiv (Hu et al., 2020), each citation as two directed edges.
    "gcn-arxiv": ("gcn", Gcn(3, 128, 256, 40, 169_343, 2_315_598, batch_norm=True)),
    "gcn-tiny": ("gcn", Gcn(2, 12, 16, 5, 20, 48)),
    "gat-tiny": ("gcn", Gcn(2, 12, 16, 5, 20, 48, attention=True, heads=4)),
    "dlrm": ("dlrm", Dlrm()),
    "dlrm-tiny": ("dlrm", Dlrm(4, 100, 16, 2, 8, "32", "32,16")),
    "whisper-small": ("whisper", Whisper()),
    "whisper-medium": ("whisper", Whisper(24, 1024, 16, 4096)),
    "whisper-large-v3": ("whisper", Whisper(32, 1280, 20, 5120, 128, vocab=51866)),
    "whisper-tiny": ("whisper", Whisper(2, 64, 4, 128, 20, 24, 256, 16)),
    "clip-vit-b-32": ("clip", Clip()),
    "clip-vit-b-16": ("clip", Clip(patch=16)),
    "clip-vit-l-14": (
        "clip",
        Clip(24, 1024, 16, 4096, 224, 14, 12, 768, 12, 3072, width=768),
    ),
    "clip-tiny": ("clip", Clip(2, 64, 4, 128, 32, 8, 2, 32, 2, 64, 256, 12, 24, 16)),
    # LLaVA-1.5: the last of the tower's 24 layers is not read, so it is left out.
    "llava-1.5-7b": ("llava", Llava()),
    "llava-1.5-13b": ("llava", Llava(40, 5120, 40, 40, 13824)),
    "llava-tiny": ("llava", Llava(2, 64, 4, 2, 128, 256, 16, 2, 32, 2, 64, 32, 8)),
}

MODELS: dict[str, tuple[str, Shape]] = {
    **{name: ("gpt", shape) for name, shape in _GPT.items()},
    **{name: ("llama", shape) for name, shape in _LLAMA.items()},
    **_TEXT,
    **_IMAGES,
    **_OTHERS,
}
