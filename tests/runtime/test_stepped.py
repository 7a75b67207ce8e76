from __future__ import annotations

import pytest
import torch
from torch import nn

from rlplace.runtime.flat import FlatLayout
from rlplace.runtime.stepped import Stepped


def stepped(weight: nn.Parameter, gradient: torch.Tensor, **copy: object) -> Stepped:
    spans = FlatLayout([weight]).spans(0, weight.numel())
    return Stepped([weight], [gradient], [spans], **copy)  # type: ignore[arg-type]  # two kinds


def test_without_a_copy_the_weights_are_stepped() -> None:
    weight, gradient = nn.Parameter(torch.ones(2, 3)), torch.ones(2, 3)
    own = stepped(weight, gradient)
    own.take_gradients()
    assert own.params[0] is weight
    assert weight.grad is gradient
    assert own.bytes == 0


@pytest.mark.parametrize("host", [False, True])
def test_a_master_copy_keeps_what_the_weights_cannot(host: bool) -> None:
    weight = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    own = stepped(weight, torch.ones(4, dtype=torch.bfloat16), master=torch.float32, host=host)
    optimizer = torch.optim.SGD(own.params, lr=2**-12)
    for _ in range(16):
        own.take_gradients()
        optimizer.step()
        own.give_weights()
    assert own.params[0].tolist() == [1 - 2**-8] * 4
    assert weight.tolist() == [1 - 2**-8] * 4
    assert own.bytes == (0 if host else 16)
    assert own.params[0].grad is None
