from __future__ import annotations

import pytest
import torch

from rlplace.runtime.weight_slices import WeightSlice, joined


@pytest.mark.parametrize("name", ["weight", "h.0.attn.c_attn.weight", "list.[1].weight"])
def test_a_key_says_which_slice_of_what_it_is(name: str) -> None:
    assert WeightSlice.of(name) == WeightSlice(name)
    assert WeightSlice(name).key == name
    for index in range(3):
        one = WeightSlice(name, index, 3)
        assert WeightSlice.of(one.key) == one
        assert one.key.rpartition(".")[0] == name.rpartition(".")[0], "of the same module"


def test_slices_are_runs_of_rows_and_together_the_whole() -> None:
    whole = torch.arange(24.0).view(6, 4)
    parts = {}
    for index in (2, 0, 1):
        one = WeightSlice("a", index, 3)
        parts[one.key] = own = one.take(whole)
        start = one.start(own)
        assert torch.equal(own.flatten(), whole.flatten()[start : start + own.numel()])
        assert own.untyped_storage().nbytes() == own.numel() * 4
    other = torch.ones(2)
    found = joined({**parts, "b": other})
    assert found["b"] is other
    assert torch.equal(found["a"], whole)
