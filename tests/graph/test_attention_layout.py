from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rlplace.graph.attention_layout import lay_out_attention
from rlplace.graph.program import Program, export_program

aten = torch.ops.aten


class Attention(nn.Module):
    """Self-attention whose query is a view of its projection, or a copy head by head."""

    def __init__(self, by_head: bool) -> None:
        super().__init__()
        self.by_head = by_head
        self.qkv = nn.Linear(8, 24)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part.view(*x.shape[:2], 2, 4).transpose(1, 2) for part in self.qkv(x).chunk(3, -1)
        )
        q = q.contiguous() if self.by_head else q
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2).sum()


def strides(program: Program, target: object) -> list[int]:
    node = [node for node in program.nodes if node.target is target][-1]
    return [int(step) for step in node.meta["val"].stride()[1:]]


@pytest.mark.parametrize("by_head", [False, True])
def test_output_and_its_transpose_lie_as_on_a_device(by_head: bool) -> None:
    module, rows = Attention(by_head), 6
    program = export_program(module, (torch.ones(2, rows, 8),))
    lay_out_attention(program)
    q = torch.empty(2, rows, 2, 4).transpose(1, 2)
    q = q.contiguous() if by_head else q
    real = F.scaled_dot_product_attention(q, q, q)
    assert strides(program, aten.scaled_dot_product_attention.default) == list(real.stride()[1:])
    assert strides(program, aten.transpose.int) == list(real.transpose(1, 2).stride()[1:])
