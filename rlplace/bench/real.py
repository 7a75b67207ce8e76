"""Library models on clusters that people have."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache

from rlplace.cluster.short import parse_cluster
from rlplace.envs.builders.room import has_room
from rlplace.graph import library
from rlplace.graph.types import OpGraph
from rlplace.plan.types import Instance

#: Name -> cluster.
CLUSTERS = {
    "8xV100-16": "8xV100-16",
    "16xA100-40": "2x8xA100-40",
    "64xA100-80": "8x8xA100-80",
    "512xA100-80": "64x8xA100-80",
    "8xTITAN-pcie": "8xTITAN-RTX-24:pcie",
    "A100+V100+T4": "8xA100-40+8xV100-16+8xT4",
    "4090+3090": "4x4090-24+4x3090-24",
    "4x4xA10-eth25": "4x4xA10:eth25",
    "6xA100-80": "6xA100-80",
    "12xH100": "3x4xH100-80",
}


@dataclass(frozen=True)
class Family:
    """Models of one family, the largest first, with the tokens of a sample where they have any."""

    name: str
    models: tuple[str, ...]
    seq_len: int | None = None


FAMILIES = (
    Family("gpt", ("gpt3-175b", "gpt3-13b", "gpt2-xl", "gpt2-medium"), 1024),
    Family("llama-2", ("llama-2-70b", "llama-2-13b", "llama-2-7b"), 2048),
    Family("llama-3", ("llama-3-70b", "llama-3-8b", "llama-3.2-1b"), 4096),
    Family("qwen2", ("qwen2-72b", "qwen2-7b", "qwen2-1.5b"), 2048),
    Family("mixtral", ("mixtral-8x22b", "mixtral-8x7b"), 2048),
    Family("bert", ("bert-large", "bert-base")),
    Family("vit", ("vit-huge", "vit-base")),
    Family("swin", ("swin-large", "swin-t")),
    Family("resnet", ("resnet-152", "resnet-50")),
    Family("llava", ("llava-1.5-13b", "llava-1.5-7b")),
    Family("lstm", ("lstm-ptb-large",)),
    Family("dlrm", ("dlrm",)),
)

#: Models that branch: encoders and decoders, two towers, the levels of a UNet.
BRANCHING = (
    Family("t5", ("t5-11b", "t5-3b", "t5-large", "t5-base")),
    Family("whisper", ("whisper-large-v3", "whisper-small")),
    Family("clip", ("clip-vit-l-14", "clip-vit-b-32")),
    Family("unet", ("sdxl-unet", "sd-1.5-unet")),
)


def pairs(families: Sequence[Family]) -> Iterator[tuple[str, Family, str]]:
    """Name, family and cluster of each problem."""
    for family in families:
        for cluster in CLUSTERS:
            yield f"{family.name} on {cluster}", family, cluster


def on_cluster(family: Family, cluster: str) -> Instance:
    """The largest model of a family that has room on a cluster; the smallest where none has.

    The global batch is 16 samples a device.
    """
    devices = parse_cluster(CLUSTERS[cluster])
    common = set.intersection(*(set(kind.peak_flops) for kind in devices.kinds))
    precision = "bf16-mixed" if "bf16" in common else "fp16-mixed"
    for model in family.models:
        graph = _graph(model, family.seq_len)
        instance = Instance(graph, devices, 16 * len(devices.devices), precision=precision)
        if has_room(instance):
            return instance
    return instance


@cache
def _graph(model: str, seq_len: int | None) -> OpGraph:
    return library.build(model, seq_len=seq_len)
