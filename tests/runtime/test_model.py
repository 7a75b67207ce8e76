from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from rlplace.errors import InputError
from rlplace.graph.program import export_program
from rlplace.runtime.model import batched_inputs, cast, peek, repeated, user_inputs


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        out: Tensor = (self.layer(x) * scale).mean()
        return out


EXAMPLE = {"x": torch.arange(6.0).view(2, 3), "scale": torch.ones(())}


def test_an_example_fills_a_batch() -> None:
    batch = repeated(EXAMPLE, 5)
    assert isinstance(batch, dict)
    assert batch["x"][:, 0].tolist() == [0, 3, 0, 3, 0]
    assert batch["scale"].shape == ()


def test_user_inputs_have_the_names_of_the_program() -> None:
    program = export_program(Net(), (), EXAMPLE)
    values = user_inputs(program, repeated(EXAMPLE, 4), 4)
    assert set(values) == set(program.inputs)
    assert batched_inputs(program) == {"x"}


def test_a_batch_of_another_size_or_shape_is_refused() -> None:
    program = export_program(Net(), (), EXAMPLE)
    with pytest.raises(InputError, match=r"data=9: input x must have 1 to 8 samples"):
        user_inputs(program, repeated(EXAMPLE, 9), 8)
    assert len(user_inputs(program, repeated(EXAMPLE, 3), 8)["x"]) == 3
    with pytest.raises(InputError, match="the model was captured with"):
        user_inputs(program, {"y": torch.zeros(4, 3)}, 4)


def test_peek_gives_the_first_batch_again() -> None:
    first, stream = peek([EXAMPLE, EXAMPLE])
    assert first is EXAMPLE
    assert len(list(stream)) == 2
    with pytest.raises(InputError, match="must yield a batch"):
        peek([])


def test_cast_leaves_integers_alone() -> None:
    batch = cast({"x": torch.zeros(2), "ids": torch.zeros(2, dtype=torch.long)}, torch.float64)
    assert isinstance(batch, dict)
    assert (batch["x"].dtype, batch["ids"].dtype) == (torch.float64, torch.int64)
