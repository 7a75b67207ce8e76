"""How attention kernels lay their output out in memory: as the query lies, not contiguously.

On the meta device attention is traced as plain matmuls, whose output is contiguous. Where a group
ends right behind it, the next one would seem to need a copy to bring the heads of a row together.
"""

from __future__ import annotations

import torch
from torch import fx

from rlplace.graph.program import Program

aten = torch.ops.aten


def lay_out_attention(program: Program) -> None:
    """Give the values of attention, and of the views that follow it, a kernel's strides."""
    for node in program.nodes:
        if node.target is not aten.scaled_dot_product_attention.default:
            continue
        query, value = (node.args[i].meta["val"] for i in (0, 2))  # type: ignore[union-attr]  # nodes
        if query.shape[:-1] + value.shape[-1:] == query.shape:
            node.meta["val"] = torch.empty_like(query)
            _follow(node)


def _follow(node: fx.Node) -> None:
    for user in node.users:
        if user.target is aten.transpose.int:
            user.meta["val"] = node.meta["val"].transpose(*user.args[1:])
