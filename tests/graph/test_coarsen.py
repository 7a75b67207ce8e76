from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rlplace.graph import library
from rlplace.graph.capture import capture
from rlplace.graph.anchors import is_matmul
from rlplace.graph.coarsen import MAX_GROUPS, coarsen
from rlplace.graph.parts import MAX_ANCHORS
from rlplace.graph.program import export_program


def groups_of(module: nn.Module, *args: Any, granularity: str = "fine") -> list[list[str]]:
    """The kinds of ops of each group."""
    program = export_program(module, args)
    kinds = {node.name: str(node.target).split(".")[1] for node in program.body()}
    return [[kinds[name] for name in group] for group in coarsen(program, granularity)]


@pytest.mark.parametrize("family", ["gpt2", "t5", "dlrm"])
def test_groups_are_intervals_and_only_tensors_cross(family: str) -> None:
    spec = library.spec(f"{family}-tiny")
    with torch.device("meta"):
        module = spec.make()
    program = export_program(module, (), spec.example(2))
    groups = coarsen(program)
    assert [name for group in groups for name in group] == [n.name for n in program.body()]
    home = {name: index for index, group in enumerate(groups) for name in group}
    for node in program.body():
        for user in node.users:
            if home.get(user.name, home[node.name]) != home[node.name]:
                assert isinstance(node.meta["val"], Tensor)
                assert home[user.name] > home[node.name]


@pytest.mark.parametrize(
    ("name", "groups", "structures"),
    [("gpt2-tiny", 6, 4), ("llama-tiny", 6, 4), ("mixtral-tiny", 6, 4), ("vit-tiny", 6, 4)],
)
def test_layers_are_an_attention_and_an_mlp_with_one_tensor_between(
    name: str, groups: int, structures: int
) -> None:
    graph = library.build(name)
    assert (len(graph.groups), len(graph.structures)) == (groups, structures)
    assert [(edge.src, edge.dst) for edge in graph.edges] == [(i, i + 1) for i in range(groups - 1)]
    uses = Counter(group.structure for group in graph.groups)
    assert sorted(uses.values()) == [1, 1, 2, 2]


def test_encoder_output_is_background() -> None:
    graph = library.build("t5-tiny")
    assert len(graph.groups) == 1 + 2 * 2 + 1 + 3 * 2 + 1
    readers = Counter(edge.tensor for edge in graph.edges)
    assert max(readers.values()) == 2  # each decoder layer reads the encoder's output


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8))
            for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = x + block(x)
        return x.mean()


def test_cut_is_right_after_the_residual_add() -> None:
    stem, first, second = groups_of(Residual(), torch.randn(2, 8))
    assert stem == ["linear"]
    assert first == ["layer_norm", "linear", "relu", "linear", "add"]
    assert second == [*first, "mean"]


def test_an_activation_goes_with_what_it_is_applied_to() -> None:
    module = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
    assert groups_of(module, torch.randn(2, 8)) == [["linear", "relu"], ["linear"]]


class Wide(nn.Module):
    """Two branches side by side: everywhere at least two tensors are alive."""

    def __init__(self, depth: int = 20) -> None:
        super().__init__()
        self.left = nn.ModuleList(nn.Linear(4, 4) for _ in range(depth))
        self.right = nn.ModuleList(nn.Linear(4, 4) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        left = right = x * 1.0
        for a, b in zip(self.left, self.right, strict=True):
            left, right = a(left), b(right)
        return (left * right).mean()


def test_a_long_interval_is_cut_even_where_two_tensors_cross() -> None:
    groups = groups_of(Wide(), torch.randn(2, 4))
    assert max(group.count("linear") for group in groups) <= MAX_ANCHORS
    assert len(groups) > 1


class Writes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.a(x)
        z = self.b(y.detach())
        y.add_(z)
        out: Tensor = self.c(y)
        return out.mean()


def test_a_tensor_is_not_changed_by_another_group_than_its_maker() -> None:
    groups = groups_of(Writes(), torch.randn(2, 4))
    (home,) = [group for group in groups if "add_" in group]
    assert home[0] == "linear"
    assert home.count("linear") == 2


def test_many_layers_lose_the_cuts_inside_layers_first() -> None:
    module = nn.Sequential(*(nn.Linear(2, 2) for _ in range(MAX_GROUPS["fine"] + 50)))
    with torch.device("meta"):
        module = module.to("meta")
    x = torch.randn(2, 2)
    fine, coarse = (len(groups_of(module, x, granularity=g)) for g in ("fine", "coarse"))
    assert MAX_GROUPS["coarse"] < fine <= MAX_GROUPS["fine"]
    assert MAX_GROUPS["coarse"] / 2 <= coarse <= MAX_GROUPS["coarse"]


def test_a_model_without_anchors_is_one_group() -> None:
    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.factor = nn.Parameter(torch.ones(4))

        def forward(self, x: Tensor) -> Tensor:
            return (x * self.factor).mean()

    graph = capture(Scale(), (torch.randn(2, 4),), degrees=())
    assert [group.ops for group in graph.groups] == [("mul", "mean")]


def test_is_matmul() -> None:
    program = export_program(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), (torch.randn(2, 4),))
    assert [is_matmul(node) for node in program.body()] == [True, False]
