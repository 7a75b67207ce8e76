"""Which weights can be cut into slices, and how a device holds them."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rlplace.graph.capture import capture
from rlplace.graph.library import build
from rlplace.graph.types import OpGraph, Weight


class Net(nn.Module):
    """Weights that one matmul reads, and others that cannot be cut."""

    def __init__(self) -> None:
        super().__init__()
        self.biased, self.plain = nn.Linear(8, 6), nn.Linear(6, 4, bias=False)
        self.added = nn.Parameter(torch.zeros(4, 10))
        self.shift = nn.Parameter(torch.zeros(10))
        self.right = nn.Parameter(torch.zeros(10, 5))
        self.twice, self.viewed = nn.Linear(5, 5), nn.Parameter(torch.zeros(3, 5))
        self.shared = nn.Linear(3, 3)
        self.shared.bias = nn.Parameter(torch.zeros(3))
        self.register_buffer("fixed", torch.zeros(3, 3))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.plain(self.biased(x))
        hidden = torch.addmm(self.shift, hidden, self.added) @ self.right
        hidden = self.twice(self.twice(hidden)) @ self.viewed.t()
        hidden = self.shared(hidden) + self.shared.bias
        out: Tensor = hidden @ self.fixed
        return out.square().mean()


class Overwritten(nn.Module):
    """A value is written into behind a matmul that stands between it and the write."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        skip = self.first(x)
        out = self.second(x)
        skip += out
        return F.relu_(skip).square().mean()


def _weights(graph: OpGraph) -> dict[str, Weight]:
    return {
        group.params[one.param]: one
        for group in graph.groups
        for one in graph.structure(group.index).work.weights
    }


def test_weights_that_one_matmul_alone_reads() -> None:
    found = _weights(capture(Net(), (), {"x": torch.zeros(2, 8)}, granularity=1, degrees=()))
    sizes = {name: (w.rows, w.columns, w.linear, w.bias) for name, w in found.items()}
    assert sizes == {
        "biased.weight": (6, 8, True, 6),
        "plain.weight": (4, 6, True, 0),
        "added": (4, 10, False, 0),
        "right": (10, 5, False, 0),
    }
    assert found["biased.weight"].elements == 6 * 8 + 6


def test_no_write_goes_over_a_cut() -> None:
    graph = capture(Overwritten(), (), {"x": torch.zeros(2, 4)}, granularity=1, degrees=())
    assert len(graph.groups) == 1
    assert list(_weights(graph)) == ["first.weight"]


def test_a_device_has_its_shard_of_a_weight() -> None:
    graph = build("bert", layers=1, hidden=16, heads=2, ffn=32, vocab=40, seq_len=4)
    index = next(i for i, group in enumerate(graph.groups) if "intermediate" in group.name)
    structure = graph.structure(index)
    held = {
        (layout.name, layout.degree): [(w.rows, w.columns, w.bias) for w in layout.work.weights]
        for layout in (*structure.layouts_with("tp", 2), *structure.layouts_with("cp", 2))
    }
    # Columns, then rows, whose summands get the bias after their sum.
    assert held["shard", 2] == held["sequence", 2] == [(16, 16, 16), (16, 16, 0)]
    assert held["replicate", 2] == held["context", 2] == [(32, 16, 32), (16, 32, 16)]


def test_a_weight_that_two_groups_use_is_not_cut() -> None:
    args = {"layers": 1, "hidden": 16, "heads": 2, "ffn": 16, "vocab": 32, "seq_len": 8}
    apart, tied = (
        build("gpt", **args, tie_embeddings=tie)  # type: ignore[arg-type]  # a dict has one type
        for tie in (False, True)
    )
    assert {name for name in _weights(apart) if "lm_head" in name}
    assert not {name for name in _weights(tied) if "wte" in name or "lm_head" in name}
