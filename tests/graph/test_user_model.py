from __future__ import annotations

from pathlib import Path

import pytest

from rlplace.errors import InputError
from rlplace.graph import capture as capturing
from rlplace.graph.user_model import capture_user_model, is_user_model, load_factory

SOURCE = """
import torch
from torch import nn
{imports}

class Net(nn.Module):
    def __init__(self, layers=2):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(layers))
        self.repeats = {repeats}

    def forward(self, x):
        for _ in range(self.repeats):
            for layer in self.layers:
                x = {act}(layer(x))
        return x.mean()

def make(seq_len=4):
    return Net(), {{"x": torch.randn(2, seq_len, 8)}}

def positional():
    return Net(), (torch.randn(2, 4, 8),)

def outside():
    options = {{"loss": nn.MSELoss(), "targets": torch.zeros(2, 4, 8)}}
    return nn.Linear(8, 8), {{"input": torch.randn(2, 4, 8)}}, options

def fixed():
    return Net(), {{"x": torch.randn(2, 4, 8)}}

def wrong():
    return Net()
"""


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RLPLACE_CACHE", str(tmp_path / "cache"))
    path = tmp_path / f"net_{abs(hash(str(tmp_path)))}.py"
    write(path)
    return path


def write(path: Path, imports: str = "", repeats: int = 1, act: str = "torch.relu") -> None:
    path.write_text(SOURCE.format(imports=imports, repeats=repeats, act=act))


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The captures that were made, not read."""
    made: list[str] = []
    plain = capturing.capture

    def counted(*args: object, **kwargs: object) -> object:
        made.append("capture")
        return plain(*args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(capturing, "capture", counted)
    return made


def test_an_unchanged_model_is_captured_once(model: Path, captures: list[str]) -> None:
    name = f"{model}:make"
    first = capture_user_model(name, degrees=())
    assert capture_user_model(name, degrees=()).fingerprint == first.fingerprint
    assert captures == ["capture"]
    capture_user_model(name, degrees=(2,))
    assert len(captures) == 2


def test_a_changed_line_an_attribute_and_a_length_are_captured_again(
    model: Path, captures: list[str]
) -> None:
    name = f"{model}:make"
    prints = [capture_user_model(name, degrees=()).fingerprint]
    write(model, act="torch.tanh")
    prints.append(capture_user_model(name, degrees=()).fingerprint)
    write(model, repeats=2)
    prints.append(capture_user_model(name, degrees=()).fingerprint)
    prints.append(capture_user_model(name, seq_len=6, degrees=()).fingerprint)
    assert len(captures) == 4
    assert len(set(prints)) == 4


def test_a_file_that_the_model_imports_belongs_to_its_source(
    model: Path, captures: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(model.parent))
    helper = model.parent / f"helper_of_{model.name}"
    helper.write_text("import torch\ndef act(x):\n    return torch.relu(x)\n")
    write(model, f"from {helper.stem} import act", act="act")
    for text in ("", "# another line\n"):
        helper.write_text(helper.read_text() + text)
        capture_user_model(f"{model}:make", degrees=())
        capture_user_model(f"{model}:make", degrees=())
    assert len(captures) == 2


def test_positional_inputs_and_a_loss_outside(model: Path) -> None:
    graph = capture_user_model(f"{model}:positional", degrees=())
    assert graph.params == 2 * 72
    graph = capture_user_model(f"{model}:outside", degrees=())
    assert graph.params == 72
    assert graph.model_flops.per_sample == 2 * 2 * 4 * 8 * 8


def test_a_length_that_the_function_does_not_take_is_refused(model: Path) -> None:
    with pytest.raises(InputError, match="has no argument seq_len"):
        capture_user_model(f"{model}:fixed", seq_len=8)


@pytest.mark.parametrize(
    ("function", "message"),
    [("wrong", "the function returns"), ("mak", "nearest legal: make"), ("nothing_like", "has no")],
)
def test_a_function_that_does_not_fit_is_refused(model: Path, function: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        capture_user_model(f"{model}:{function}")


def test_names() -> None:
    assert is_user_model("net.py:make")
    assert not is_user_model("llama-3-8b")
    with pytest.raises(InputError, match="no such file"):
        load_factory("nowhere.py:make")
    with pytest.raises(InputError, match="cannot be imported"):
        load_factory("no_such_package.models:make")
