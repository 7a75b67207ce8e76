from __future__ import annotations

import torch
from torch import Tensor, nn

from rlplace.graph.program import Program, export_program, extract
from rlplace.runtime.pieces import protected


def test_a_piece_leaves_what_it_reads_alone() -> None:
    class InPlace(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (x * 2).view(-1).relu_().sum()

    program: Program = export_program(InPlace(), (), {"x": torch.zeros(2, 4)})
    names = [node.name for node in program.nodes]
    piece = protected(extract(program, names[1:], device="cpu"))
    value = -torch.ones(2, 4)
    piece.module(value)
    assert torch.equal(value, -torch.ones(2, 4))
