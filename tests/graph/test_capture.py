from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from rlplace.errors import CaptureError, InputError
from rlplace.graph.capture import capture
from rlplace.graph.program import export_program
from rlplace.graph.types import Affine, OpGraph


class Mlp(nn.Module):
    """Equal layers, so that isomorphic groups must be found."""

    def __init__(self, layers: int = 3, width: int = 8) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x.square().mean()


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 8)
        self.mid = nn.Linear(8, 8)
        self.head = nn.Linear(8, 32, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.head(self.mid(self.embed(ids)))
        return logits.logsumexp(-1).mean()


class Branchy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)
        if y.sum() > 0:  # the line that the message must name
            y = y * 2
        return y.mean()


@pytest.fixture(scope="module")
def mlp() -> OpGraph:
    return capture(Mlp(5), (torch.randn(4, 8),), degrees=())


def test_every_body_node_is_in_exactly_one_group(mlp: OpGraph) -> None:
    body = [node.name for node in export_program(Mlp(5), (torch.randn(4, 8),)).body()]
    assert [op for group in mlp.groups for op in group.ops] == body


def test_isomorphic_groups_share_a_structure(mlp: OpGraph) -> None:
    assert len(mlp.groups) == 5
    middle = [group.structure for group in mlp.groups[1:-1]]
    # The first has an input without gradient, the last one the loss.
    assert len(set(middle)) == 1
    assert len(mlp.structures) == 3


def test_edges_are_a_chain_with_sizes_in_the_batch(mlp: OpGraph) -> None:
    assert [(edge.src, edge.dst) for edge in mlp.edges] == [(0, 1), (1, 2), (2, 3), (3, 4)]
    assert all(edge.floats == Affine(0.0, 8.0) for edge in mlp.edges)


def test_names_params_and_defaults(mlp: OpGraph) -> None:
    assert [group.name for group in mlp.groups[:2]] == ["layers.0", "layers.1"]
    assert mlp.groups[1].params == ("layers.1.weight", "layers.1.bias")
    assert mlp.groups[1].modules[0] == "layers.1"
    assert (mlp.name, mlp.tokens_per_sample, mlp.tied) == ("Mlp", 1, ())
    assert mlp.params == sum(p.numel() for p in Mlp(5).parameters())


def test_same_model_same_fingerprint_and_another_depth_another() -> None:
    x = torch.randn(3, 8)
    first, again, deeper = (capture(Mlp(n), (x,), degrees=()) for n in (2, 2, 3))
    assert first.fingerprint == again.fingerprint != deeper.fingerprint


def test_tied_parameter_is_counted_once() -> None:
    module = Tied()
    graph = capture(module, (torch.randint(0, 32, (2, 6)),), degrees=())
    assert graph.tied == (("embed.weight", 32 * 8),)
    assert graph.params == sum(p.numel() for p in module.parameters())
    assert graph.tokens_per_sample == 6


def test_frozen_parameters_are_told_apart() -> None:
    module = Mlp(3)
    module.layers[0].requires_grad_(False)
    graph = capture(module, (torch.randn(2, 8),), degrees=())
    first, second = (graph.structure(index).work for index in (0, 1))
    assert (first.params, first.frozen_params) == (0, 72)
    assert first.backward_flops == Affine()
    # The gradient of its weight, but none of its input.
    assert second.backward_flops == second.flops
    assert graph.params == 2 * 72


def test_layouts_are_found_for_each_degree() -> None:
    graph = capture(Mlp(2, 16), (torch.randn(2, 16),), degrees=(2, 4))
    layouts = graph.structures[0].layouts
    assert {layout.degree for layout in layouts} == {2, 4}
    halved = graph.structures[0].layouts_at(2)[1]
    assert halved.work.flops == graph.structures[0].work.flops * 0.5
    assert len(halved.params) == len(graph.groups[0].params)


def test_data_dependent_branch_names_the_users_line() -> None:
    with pytest.raises(CaptureError) as error:
        capture(Branchy(), (torch.randn(2, 4),))
    line = next(
        number
        for number, text in enumerate(open(__file__).read().split("\n"), 1)
        if "the line that the message must name" in text
    )
    assert f"{__file__}:{line}" in str(error.value)
    assert "Branchy" in str(error.value)
    assert "torch.where" in str(error.value)


def test_batch_of_one_is_refused() -> None:
    with pytest.raises(CaptureError, match="batch of 2 or more"):
        capture(Mlp(), (torch.randn(1, 8),))


def test_unknown_granularity_is_refused() -> None:
    with pytest.raises(InputError, match="granularity='finest'"):
        capture(Mlp(), (torch.randn(2, 8),), granularity="finest")
