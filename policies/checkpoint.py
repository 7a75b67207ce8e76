"""Where a training run stands, on disk: whole or not at all.

A checkpoint is a folder ``NUMBER`` with ``state.safetensors`` and ``meta.json`` (which holds the
hash of the former). It is written under another name and renamed when complete; one that was cut
off or changed all the same is passed over with a warning, and the one before it is used.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor, nn

_STATE, _META = "state.safetensors", "meta.json"
#: Complete checkpoints that are kept.
_KEPT = 3


@dataclass(frozen=True)
class Checkpoint:
    """What was saved.

    Args:
        number: Grows with every checkpoint of a run.
        tensors: Weights and the state of the optimizer.
        meta: Counters and whatever else is JSON.
    """

    number: int
    tensors: dict[str, Tensor]
    meta: dict[str, Any]

    def part(self, prefix: str) -> dict[str, Tensor]:
        """The tensors whose names begin with `prefix` and a dot, without it."""
        start = f"{prefix}."
        return {
            name.removeprefix(start): value
            for name, value in self.tensors.items()
            if name.startswith(start)
        }


def save_checkpoint(folder: Path, checkpoint: Checkpoint) -> Path:
    """Write a checkpoint; the oldest ones are removed. Returns where it lies."""
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / f"{checkpoint.number:08d}"
    partial = folder / f"{target.name}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    data = save({name: value.contiguous() for name, value in checkpoint.tensors.items()})
    meta = {"sha256": hashlib.sha256(data).hexdigest(), "meta": checkpoint.meta}
    _write(partial / _STATE, data)
    _write(partial / _META, json.dumps(meta).encode())
    shutil.rmtree(target, ignore_errors=True)
    partial.rename(target)
    for old in _numbered(folder)[:-_KEPT]:
        shutil.rmtree(old, ignore_errors=True)
    return target


def latest_checkpoint(folder: Path) -> Checkpoint | None:
    """The newest checkpoint that is complete; damaged ones are named in a warning."""
    for path in reversed(_numbered(folder)):
        try:
            return _read(path)
        except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
            warnings.warn(
                f"checkpoint {path} is damaged ({error}); using an older one", stacklevel=2
            )
    return None


def optimizer_tensors(net: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The state of an optimizer over `net.parameters()`, by parameter: ``NAME.exp_avg``, ..."""
    states = optimizer.state_dict()["state"]
    return {
        f"{name}.{key}": value.clone()
        for index, (name, _) in enumerate(net.named_parameters())
        for key, value in states.get(index, {}).items()
    }


def restore_optimizer(
    net: nn.Module, optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor]
) -> None:
    """Put back what `optimizer_tensors` gave."""
    states: dict[int, dict[str, Tensor]] = {}
    places = {name: index for index, (name, _) in enumerate(net.named_parameters())}
    for key, value in tensors.items():
        name, entry = key.rsplit(".", 1)
        states.setdefault(places[name], {})[entry] = value
    groups = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict({"state": states, "param_groups": groups})


def _read(path: Path) -> Checkpoint:
    content = json.loads((path / _META).read_text())
    data = (path / _STATE).read_bytes()
    if hashlib.sha256(data).hexdigest() != content["sha256"]:
        raise ValueError(f"{_STATE} is cut off or was changed")
    return Checkpoint(int(path.name), load(data), content["meta"])


def _numbered(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    return sorted(path for path in folder.iterdir() if path.is_dir() and path.name.isdecimal())


def _write(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
