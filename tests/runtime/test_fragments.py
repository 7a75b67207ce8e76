from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from rlplace.graph.types import Replicate
from rlplace.runtime.fragments import Held, fragments, make_states
from rlplace.runtime.stepped import Run


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.NAdam, torch.optim.Rprop])
def test_states_that_are_made_beforehand_change_no_step(kind: Any) -> None:
    torch.manual_seed(0)
    weights, early = nn.Parameter(torch.randn(7)), nn.Parameter(torch.zeros(7))
    early.data.copy_(weights.detach())
    plain, prepared = kind([weights]), kind([early])
    make_states(prepared)
    assert torch.equal(weights, early)
    for _ in range(3):
        weights.grad = torch.randn(7)
        early.grad = weights.grad.clone()
        plain.step()
        make_states(prepared)
        prepared.step()
    assert torch.equal(weights, early)


def test_values_of_a_run_are_views() -> None:
    param = nn.Parameter(torch.zeros(2, 3))
    flat = nn.Parameter(torch.arange(8.0))
    optimizer = torch.optim.Adam([flat])
    make_states(optimizer)
    run = Run(param, 1, 5, flat, 2)
    (found,) = fragments([run], {id(param): Held("w", (2, 3), Replicate())}, optimizer)
    assert found.values["weight"].tolist() == [2.0, 3.0, 4.0, 5.0]
    assert set(found.values) == {"weight", "exp_avg", "exp_avg_sq"}
    assert found.numbers["step"].item() == 0.0
    found.values["exp_avg"].fill_(1.0)
    assert optimizer.state[flat]["exp_avg"].tolist() == [0, 0, 1, 1, 1, 1, 0, 0]


def test_rows_and_columns_of_a_whole_parameter_are_numbers() -> None:
    param = nn.Parameter(torch.ones(2, 3))
    optimizer = torch.optim.Adafactor([param])
    make_states(optimizer)
    held = {id(param): Held("w", (2, 3), Replicate())}
    (found,) = fragments([Run(param, 0, 6, param)], held, optimizer)
    assert {"row_var", "col_var"} <= set(found.numbers)
    assert set(found.values) == {"weight"}
