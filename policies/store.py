"""Policies on disk: a folder with ``policy.safetensors``, ``config.json`` and ``CARD.md``.

Nothing is ever unpickled: reading a policy from a stranger runs none of their code.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError
from safetensors.numpy import load as load_bytes

from rlplace.errors import InputError
from rlplace.policies.types import NETWORK_VERSION, NetConfig

if TYPE_CHECKING:
    from rlplace.policies.network import PlaceNet
    from rlplace.policies.numpy_net import NumpyNet

WEIGHTS, CONFIG, CARD = "policy.safetensors", "config.json", "CARD.md"
Weights = dict[str, npt.NDArray[np.float32]]


def save_policy(net: PlaceNet, path: str | Path, card: str) -> None:
    """Write a network into a folder.

    Args:
        net: The network.
        path: The folder; made if missing, its policy replaced if there is one.
        card: What it was trained on, how, and how good it is, in Markdown.
    """
    from safetensors.torch import save

    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    data = save({name: value.contiguous() for name, value in net.state_dict().items()})
    config = {
        "version": NETWORK_VERSION,
        "network": asdict(net.config),
        "sha256": hashlib.sha256(data).hexdigest(),
    }
    (folder / WEIGHTS).write_bytes(data)
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
    (folder / CARD).write_text(card)


def load_policy(path: str | Path) -> PlaceNet:
    """Read a network for torch; stable_baselines3 and torch_geometric are not imported.

    Raises:
        InputError: If a file is missing, cut off, changed, or made for other features.
    """
    import torch

    from rlplace.policies.network import PlaceNet

    config, weights = read_policy(path)
    net = PlaceNet(config)
    expected = {name: tuple(value.shape) for name, value in net.state_dict().items()}
    _check_shapes(Path(path) / WEIGHTS, expected, weights)
    net.load_state_dict({name: torch.from_numpy(value) for name, value in weights.items()})
    return net.eval()


def load_numpy_policy(path: str | Path) -> NumpyNet:
    """Read a network for numpy: the same answers to about 1e-5, and torch is not imported.

    Raises:
        InputError: As `load_policy`.
    """
    from rlplace.policies.numpy_net import NumpyNet, expected_shapes

    config, weights = read_policy(path)
    _check_shapes(Path(path) / WEIGHTS, expected_shapes(config), weights)
    return NumpyNet(config, weights)


def read_policy(path: str | Path) -> tuple[NetConfig, Weights]:
    """The configuration and the raw weights of a policy folder, checked against each other.

    Raises:
        InputError: If a file is missing, cut off, changed, or made for other features.
    """
    folder = Path(path)
    for name in (CONFIG, WEIGHTS):
        if not (folder / name).is_file():
            raise InputError("policy", str(path), f"a policy folder holds {name}")
    config, digest = _read_config(folder / CONFIG)
    data = (folder / WEIGHTS).read_bytes()
    where = str(folder / WEIGHTS)
    try:
        weights: Weights = load_bytes(data)
    except SafetensorError as error:
        rule = f"the file is cut off or is no safetensors file ({error})"
        raise InputError("policy", where, rule, "a fresh copy") from error
    if hashlib.sha256(data).hexdigest() != digest:
        rule = f"its SHA-256 is not the one in {CONFIG}: one of the two files was changed"
        raise InputError("policy", where, rule, "a fresh copy of both")
    return config, weights


def _read_config(path: Path) -> tuple[NetConfig, str]:
    try:
        content: dict[str, Any] = json.loads(path.read_text())
        version, network, digest = (content[key] for key in ("version", "network", "sha256"))
    except (json.JSONDecodeError, KeyError, TypeError, UnicodeDecodeError) as error:
        rule = "must be JSON with version, network and sha256"
        raise InputError("policy", str(path), f"{rule} ({error})", "a fresh copy") from error
    if version != NETWORK_VERSION:
        raise InputError("version", version, f"{path} is of another version", NETWORK_VERSION)
    known = {item.name for item in fields(NetConfig)}
    if set(network) != known:
        odd = ", ".join(sorted(set(network) ^ known))
        raise InputError("network", odd, f"{path} has unknown or missing entries")
    config, now = NetConfig(**network), NetConfig()
    for item in known:
        if item.endswith("_features") and getattr(config, item) != getattr(now, item):
            rule = "the policy was trained for other features: train it again"
            raise InputError(item, getattr(config, item), rule, getattr(now, item))
    return config, digest


def _check_shapes(path: Path, expected: dict[str, tuple[int, ...]], weights: Weights) -> None:
    if set(expected) != set(weights):
        odd = sorted(set(expected) ^ set(weights))
        raise InputError("policy", str(path), f"unknown or missing tensors: {', '.join(odd[:5])}")
    for name, shape in expected.items():
        if weights[name].shape != shape or weights[name].dtype != np.float32:
            got = f"{weights[name].dtype}{weights[name].shape}"
            raise InputError(name, got, f"{path} has a tensor of a wrong shape", f"float32{shape}")
