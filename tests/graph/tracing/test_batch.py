from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from rlplace.errors import CaptureError, InputError
from rlplace.graph.tracing.batch import batch_dims


def found(arguments: dict[str, Any], batch_dim: Any = None) -> dict[str, int | None]:
    """The dim found for each argument that is a tensor."""
    dims = batch_dims(list(arguments.items()), batch_dim)
    return {name: dims.get(id(value)) for name, value in arguments.items()}


IDS, LABELS, EDGES = torch.zeros(4, 6), torch.zeros(4), torch.zeros(2, 6)


def test_dim_0_of_the_first_tensor_and_of_all_of_its_size() -> None:
    dims = found({"ids": IDS, "labels": LABELS, "edges": EDGES, "flag": True, "none": None})
    assert dims == {"ids": 0, "labels": 0, "edges": None, "flag": None, "none": None}


def test_scalars_have_no_batch_and_nested_tensors_are_seen() -> None:
    inner = torch.zeros(4, 2)
    dims = batch_dims([("scale", torch.tensor(1.0)), ("batch", {"x": [inner]})])
    assert dims == {id(inner): 0}


def test_a_number_is_for_all_and_labels_have_it_in_dim_0() -> None:
    dims = found({"x": torch.zeros(6, 4, 2), "labels": LABELS, "mask": torch.zeros(6, 6)}, 1)
    assert dims == {"x": 1, "labels": 0, "mask": None}


def test_names_say_where_it_is() -> None:
    arguments = {"edges": EDGES, "x": torch.zeros(5, 4), "y": LABELS}
    assert found(arguments, {"edges": None, "x": 1}) == {"edges": None, "x": 1, "y": 0}


@pytest.mark.parametrize(
    ("batch_dim", "message"),
    [
        ({"idz": 0}, "nearest legal: ids"),
        ({"ids": 2}, "has 2 dims"),
        ({"ids": 1, "labels": 0}, "one batch size"),
        (3, "no input tensor has this dim"),
    ],
)
def test_what_does_not_fit_is_refused(batch_dim: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        found({"ids": IDS, "labels": LABELS}, batch_dim)


@pytest.mark.parametrize("x", [torch.zeros(1, 4), torch.tensor(2.0)])
def test_a_batch_of_less_than_two_is_refused(x: Tensor) -> None:
    with pytest.raises(CaptureError, match="at least 2"):
        found({"x": x})
