from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from rlplace.envs.types import Candidates, InstanceView
from rlplace.errors import InputError
from rlplace.policies.network import PlaceNet
from rlplace.policies.store import load_numpy_policy, load_policy, save_policy

States = list[tuple[InstanceView, Candidates, int]]


@pytest.fixture
def saved(tmp_path: Path, trained_like: PlaceNet) -> Path:
    save_policy(trained_like, tmp_path / "policy", "# A card\n")
    return tmp_path / "policy"


def edit(path: Path, **changes: Any) -> None:
    content = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(content | changes))


def test_round_trip_is_exact(saved: Path, trained_like: PlaceNet, toy_states: States) -> None:
    loaded = load_policy(saved)
    assert loaded.config == trained_like.config
    for view, candidates, step in toy_states:
        (first,) = trained_like.score(trained_like.encode(view), [candidates], step)
        (second,) = loaded.score(loaded.encode(view), [candidates], step)
        assert np.array_equal(first, second)
    assert (saved / "CARD.md").read_text() == "# A card\n"


def test_numpy_reads_the_same_files(
    saved: Path, trained_like: PlaceNet, toy_states: States
) -> None:
    net = load_numpy_policy(saved)
    view, candidates, step = toy_states[0]
    (first,) = trained_like.score(trained_like.encode(view), [candidates], step)
    (second,) = net.score(net.encode(view), [candidates], step)
    np.testing.assert_allclose(first, second, atol=1e-5)


def test_loading_imports_no_training_library(saved: Path) -> None:
    code = (
        f"import sys; from rlplace.policies.store import load_policy; load_policy({str(saved)!r});"
        "bad = ('stable_baselines3', 'sb3_contrib', 'wandb', 'torch_geometric');"
        "sys.exit(any(name in sys.modules for name in bad))"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=120, check=False).returncode == 0


@pytest.mark.parametrize("keep", [0, 7, 100, 5000])
def test_cut_off_weights_are_refused(saved: Path, keep: int) -> None:
    file = saved / "policy.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(InputError, match="cut off"):
        load_policy(saved)


def test_changed_weights_are_refused(saved: Path) -> None:
    file = saved / "policy.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(bytes(data))
    with pytest.raises(InputError, match="SHA-256"):
        load_policy(saved)


def test_cut_off_config_is_refused(saved: Path) -> None:
    file = saved / "config.json"
    file.write_text(file.read_text()[:40])
    with pytest.raises(InputError, match="must be JSON"):
        load_policy(saved)


@pytest.mark.parametrize("name", ["config.json", "policy.safetensors"])
def test_missing_file_is_named(saved: Path, name: str) -> None:
    (saved / name).unlink()
    with pytest.raises(InputError, match=name):
        load_policy(saved)


def test_other_version_is_refused(saved: Path) -> None:
    edit(saved, version=999)
    with pytest.raises(InputError, match="another version"):
        load_policy(saved)


def test_other_features_are_refused(saved: Path, trained_like: PlaceNet) -> None:
    content = json.loads((saved / "config.json").read_text())
    edit(saved, network=content["network"] | {"op_features": 5})
    with pytest.raises(InputError, match="op_features=5: the policy was trained for other"):
        load_policy(saved)


@pytest.mark.parametrize("reader", [load_policy, load_numpy_policy])
def test_wrong_shape_is_refused(saved: Path, reader: Any) -> None:
    import hashlib

    file = saved / "policy.safetensors"
    tensors = load_file(file)
    tensors["scorer.own.weight"] = torch.zeros(3, 3)
    save_file(tensors, file)
    edit(saved, sha256=hashlib.sha256(file.read_bytes()).hexdigest())
    with pytest.raises(InputError, match=r"wrong shape.*float32\(32, 32\)"):
        reader(saved)


def test_unknown_network_entry_is_refused(saved: Path) -> None:
    content = json.loads((saved / "config.json").read_text())
    edit(saved, network=content["network"] | {"depth": 3})
    with pytest.raises(InputError, match="depth"):
        load_policy(saved)
