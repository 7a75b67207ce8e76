"""Models of published measurements that the library does not have, as plain torch modules."""

from __future__ import annotations

from typing import Any

from rlplace.graph.types import OpGraph


def capture_model(family: str, shape: dict[str, Any], degrees: tuple[int, ...] = ()) -> OpGraph:
    """The op graph of one of these models; from the cache on disk if it was captured before.

    Args:
        family: ``wide-resnet``, ``gpt-moe``, ``amoebanet`` or ``torchgpipe-unet``.
        shape: Arguments of its class.
        degrees: Degrees of the tp axis to find layouts for.
    """
    import torch

    import rlplace
    from benchmarks.models.amoebanet import AmoebaNet
    from benchmarks.models.gpt_moe import GptMoe
    from benchmarks.models.torchgpipe_unet import TorchgpipeUnet
    from benchmarks.models.wide_resnet import WideResNet

    classes: dict[str, Any] = {
        "wide-resnet": WideResNet,
        "gpt-moe": GptMoe,
        "amoebanet": AmoebaNet,
        "torchgpipe-unet": TorchgpipeUnet,
    }
    with torch.device("meta"):
        module = classes[family](**shape)
        inputs = module.example(2)
    return rlplace.capture(module, (), inputs, cache=True, name=family, degrees=degrees)
