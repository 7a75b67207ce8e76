from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from rlplace.graph.model_key import model_key


class Net(nn.Module):
    def __init__(self, width: int = 4, scale: float = 1.0) -> None:
        super().__init__()
        self.layer = nn.Linear(width, width)
        self.settings = {"scale": scale, "shape": (1, 2)}

    def forward(self, x: torch.Tensor) -> Any:
        return self.layer(x)


def key(module: nn.Module, x: torch.Tensor | None = None, **options: Any) -> Any:
    return model_key(module, ((torch.zeros(2, 4) if x is None else x,), {}), options)


def test_equal_modules_have_equal_keys_whatever_their_weights() -> None:
    assert key(Net()) == key(Net())
    assert key(Net()) is not None


def frozen() -> nn.Module:
    return Net().requires_grad_(False)


def tied() -> nn.Module:
    first, second = Net(), Net()
    second.layer.weight = first.layer.weight
    return nn.Sequential(first, second)


def hooked() -> nn.Module:
    made = Net()
    made.register_forward_hook(lambda module, args, output: output)
    return made


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (Net, lambda: Net(width=8)),
        (Net, lambda: Net(scale=2.0)),
        (Net, lambda: Net().eval()),
        (Net, lambda: Net().to(torch.bfloat16)),
        (Net, frozen),
        (Net, hooked),
        (lambda: nn.Sequential(Net(), Net()), tied),
        (lambda: nn.Dropout(0.1), lambda: nn.Dropout(0.2)),
    ],
)
def test_what_a_capture_depends_on_is_in_the_key(
    one: Callable[[], nn.Module], other: Callable[[], nn.Module]
) -> None:
    assert key(one()) != key(other())


def test_inputs_and_options_are_in_the_key() -> None:
    plain = key(Net())
    assert plain != key(Net(), torch.zeros(3, 4))
    assert plain != key(Net(), torch.zeros(2, 4, dtype=torch.float16))
    assert plain != key(Net(), degrees=(2,))
    assert key(Net(), loss=nn.MSELoss()) != key(Net(), loss=nn.MSELoss(reduction="sum"))
    assert key(Net(), batch_dim=1) == key(Net(), batch_dim=1)


def test_what_has_no_source_file_has_no_key() -> None:
    space: dict[str, Any] = {"nn": nn, "__name__": "prompt"}
    text = "class Typed(nn.Module):\n    def forward(self, x):\n        return x\n"
    exec(compile(text, "<prompt>", "exec"), space)
    assert key(space["Typed"]()) is None
