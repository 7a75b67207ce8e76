"""What a capture that fails says: the user's own line, the reason, and a way out that fits it."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rlplace.errors import CaptureError
from rlplace.graph.program import export_program
from rlplace.graph.tracing import refusals


@torch.library.custom_op("rlplace_tests::unknown_shape", mutates_args=())
def unknown_shape(x: Tensor) -> Tensor:
    return x * 2


def branch(x: Tensor) -> Tensor:
    return x * 2 if x.sum() > 0 else x


def loop(x: Tensor) -> Tensor:
    for _ in range(int(x.sum())):
        x = x + 1
    return x


def number_in_view(x: Tensor) -> Tensor:
    return x.view(4, 2, 4)


def number_in_branch(x: Tensor) -> Tensor:
    if x.shape[0] == 4:
        x = x * 2
    return x


def per_sample(x: Tensor) -> Tensor:
    return torch.stack([row.sum() for row in x])


def through_numpy(x: Tensor) -> Tensor:
    return torch.as_tensor(x.detach().numpy().cumsum(0))


def custom(x: Tensor) -> Tensor:
    out: Tensor = unknown_shape(x)
    return out


def as_item(x: Tensor) -> Tensor:
    return x * x.abs().max().item()


def no_tensor(x: Tensor) -> Any:
    return {"n": x.shape[1], "note": "nothing"}


def wrong_sizes(x: Tensor) -> Tensor:
    return x @ torch.zeros(3, 3, device=x.device)


class Calls(nn.Module):
    """Its forward calls a function of this file."""

    def __init__(self, function: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(self.layer(x))


def refusal(function: Callable[[Tensor], Any]) -> str:
    with pytest.raises(CaptureError) as error:
        export_program(nn.Sequential(Calls(function)), (torch.ones(4, 8),))
    return str(error.value)


@pytest.mark.parametrize(
    ("function", "line", "reason", "way"),
    [
        (branch, 1, "data-dependent", "torch.where"),
        (loop, 1, "data-dependent", "torch.where"),
        (number_in_view, 1, "8*batch == 32", "give view and reshape -1"),
        (number_in_branch, 1, "batch == 4", "x.shape[0]"),
        (per_sample, 1, "batch == 4", "do not loop over the batch"),
        (through_numpy, 1, "numpy", "torch.library.custom_op"),
        (custom, 1, "no fake impl", "register_fake"),
        (wrong_sizes, 1, "same reduction dim", "check that the module runs on these inputs"),
    ],
)
def test_the_users_line_the_reason_and_a_way_out(
    function: Callable[[Tensor], Any],
    line: int,
    reason: str,
    way: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    message = refusal(function)
    assert capsys.readouterr() == ("", "")
    first = inspect.getsourcelines(function)[1]
    assert f"{__file__}:{first + line} in {function.__name__}" in message
    head, _, advice = message.partition("Ways out: ")
    assert reason in head
    assert way in advice
    assert "site-packages" not in message


def test_a_number_that_depends_on_values_is_refused_with_its_module() -> None:
    message = refusal(as_item)
    assert "item in the forward of 0" in message
    assert "keep a number as a tensor" in message


def test_an_output_without_tensors_is_refused() -> None:
    assert "no tensor in it" in refusal(no_tensor)


def test_a_library_model_is_named_where_the_user_has_no_line_in_it() -> None:
    files = [(__file__, "main"), (refusals.__file__, "explain"), (nn.__file__, "call")]
    files.append((pytest.__file__, "inside"))
    stack = traceback.StackSummary.from_list([(file, 7, name, "") for file, name in files])
    assert refusals.where(stack) == f"{pytest.__file__}:7 in inside"
    own = traceback.StackSummary.from_list([*stack, (__file__, 9, "forward", "")])
    assert refusals.where(own) == f"{__file__}:9 in forward"
