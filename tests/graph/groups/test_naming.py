from __future__ import annotations

import pytest
import torch
from torch import nn

from rlplace.graph.coarsen import coarsen
from rlplace.graph.groups.drafts import drafts_of
from rlplace.graph.groups.naming import group_names
from rlplace.graph.program import Program, export_program
from tests.graph.branching_modules import EXAMPLES, exported


def names_of(program: Program, groups: str | int = "fine") -> list[str]:
    return group_names(drafts_of(program, coarsen(program, groups)))


@pytest.mark.parametrize(
    ("name", "names"),
    [
        ("layers", "layers.0.attn layers.0.mlp layers.1.attn layers.1.mlp"),
        ("parallel", "embed layers.0.attn layers.0.mlp layers.1.attn layers.1.mlp"),
        ("shortcut", "stem main shortcut"),
        ("functional", "w.0 w.1 w.2"),
    ],
)
def test_a_group_has_the_name_of_the_module_that_it_is_all_of(name: str, names: str) -> None:
    assert names_of(exported(name)) == names.split()


def test_branches_have_the_name_that_their_steps_share() -> None:
    names = names_of(exported("inception"))
    branches = ["branch5x5", "branch3x3", "branch_pool", "branch1x1"]
    assert names == ["stem", *(f"mixed_5{c}.{b}" for c in "bc" for b in branches), "fc"]


def test_a_module_that_is_used_twice_is_numbered() -> None:
    tower = [f"tower.{i}.0" for i in range(4)]
    assert names_of(exported("siamese")) == [*tower, *(f"{name}#2" for name in tower), "head"]


def test_a_share_of_a_module_lists_its_children() -> None:
    program = exported("layers")
    groups = coarsen(program)
    halves = [groups[0][:8], groups[0][8:], *groups[1:]]
    first, second, *rest = group_names(drafts_of(program, halves))
    assert first == "layers.0.attn.k+v+q"
    assert second == "layers.0.attn.o"
    assert rest == ["layers.0.mlp", "layers.1.attn", "layers.1.mlp"]


def test_the_first_part_goes_where_all_have_it() -> None:
    class Wrapper(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)})

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = self.model["a"](x)
            result: torch.Tensor = self.model["b"](hidden).mean()
            return result

    assert names_of(export_program(Wrapper(), (torch.randn(2, 4),))) == ["a", "b"]


def test_without_modules_the_parameters_give_the_name() -> None:
    assert names_of(exported("functional"), groups=1) == ["w.0+w.1+w.2"]


@pytest.mark.parametrize("name", EXAMPLES)
@pytest.mark.parametrize("groups", ["fine", "coarse", 3, 1000])
def test_names_are_unique_and_say_something(name: str, groups: str | int) -> None:
    names = names_of(exported(name), groups=groups)
    assert len(set(names)) == len(names)
    assert all(name and not name[0].isdigit() for name in names)
