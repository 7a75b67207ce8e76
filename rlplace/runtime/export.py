"""The user's module out of a checkpoint."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file

from rlplace.errors import InputError
from rlplace.runtime.manifest import latest_good
from rlplace.runtime.restore import read_items


def export_weights(folder: str | Path, path: str | Path) -> Path:
    """Write the weights and buffers of the last good checkpoint as safetensors.

    A tensor that a module has under several names (tied weights) is written under the one that the
    graph has, and constants of the graph are among the buffers: load it with ``strict=False``.

    Args:
        folder: Of all checkpoints of a run.
        path: The file.

    Returns:
        The checkpoint that was taken.

    Raises:
        InputError: If there is no good checkpoint.
    """
    last = latest_good(Path(folder))
    if last is None:
        raise InputError("folder", str(folder), "has no good checkpoint")
    tensors: dict[str, torch.Tensor] = {}
    for item, tensor in read_items(last):
        kind, _, name = item.partition("/")
        if kind in ("weight", "buffer"):
            tensors[name] = tensor.contiguous()
    save_file(tensors, path)
    return last
