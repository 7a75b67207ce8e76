from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from rlplace.policies.checkpoint import (
    Checkpoint,
    latest_checkpoint,
    optimizer_tensors,
    restore_optimizer,
    save_checkpoint,
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for number in (1, 2):
        tensors = {"net.w": torch.full((3,), float(number))}
        save_checkpoint(tmp_path, Checkpoint(number, tensors, {"update": number}))
    return tmp_path


def test_latest_is_read_back(folder: Path) -> None:
    found = latest_checkpoint(folder)
    assert found is not None
    assert (found.number, found.meta) == (2, {"update": 2})
    assert torch.equal(found.part("net")["w"], torch.full((3,), 2.0))


def test_no_checkpoint_is_none(tmp_path: Path) -> None:
    assert latest_checkpoint(tmp_path / "nothing") is None


@pytest.mark.parametrize("name", ["state.safetensors", "meta.json"])
@pytest.mark.parametrize("keep", [0, 10, -1])
def test_damaged_checkpoint_is_passed_over(folder: Path, name: str, keep: int) -> None:
    file = folder / "00000002" / name
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.warns(UserWarning, match="00000002 is damaged"):
        found = latest_checkpoint(folder)
    assert found is not None
    assert found.number == 1


def test_missing_part_is_passed_over(folder: Path) -> None:
    (folder / "00000002" / "state.safetensors").unlink()
    with pytest.warns(UserWarning, match="is damaged"):
        found = latest_checkpoint(folder)
    assert found is not None
    assert found.number == 1


def test_half_written_checkpoint_is_not_seen(folder: Path) -> None:
    (folder / "00000003.partial").mkdir()
    (folder / "00000003.partial" / "meta.json").write_text(json.dumps({}))
    found = latest_checkpoint(folder)
    assert found is not None
    assert found.number == 2


def test_only_the_last_few_are_kept(folder: Path) -> None:
    for number in range(3, 8):
        save_checkpoint(folder, Checkpoint(number, {"a": torch.zeros(1)}, {}))
    assert sorted(path.name for path in folder.iterdir()) == ["00000005", "00000006", "00000007"]


def test_optimizer_goes_on_as_if_nothing_had_happened() -> None:
    def step(net: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        net(torch.ones(1, 2)).square().sum().backward()
        optimizer.step()

    torch.manual_seed(0)
    net, twin = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    first, second = (torch.optim.Adam(module.parameters()) for module in (net, twin))
    step(net, first)
    twin.load_state_dict(net.state_dict())
    restore_optimizer(twin, second, optimizer_tensors(net, first))
    for pair in ((net, first), (twin, second)):
        step(*pair)
    assert all(torch.equal(a, b) for a, b in zip(net.parameters(), twin.parameters(), strict=True))
