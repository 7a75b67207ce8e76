"""What each op costs, roughly and at once: enough to see which groups are dear.

The exact counts (`rlplace.graph.count`) run a group and so need the groups first.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from torch import Tensor, fx

from rlplace.graph.groups.anchors import is_recurrent
from rlplace.graph.program import Program
from rlplace.graph.shapes import at_batch
from rlplace.graph.sharding.matmuls import matmul

#: FLOPs that take as long as moving an element: today's accelerators do some hundreds.
MOVED_FLOPS = 100.0
#: FLOPs that a parameter held is worth: it is read, and updated by the optimizer.
HELD_FLOPS = 20.0


def weights(program: Program, body: Sequence[fx.Node]) -> list[float]:
    """Cost of each op for one sample, in FLOPs: its own, its memory traffic's, its parameters'."""
    sizes = {node: _elements(node) for node in program.exported.graph.nodes}
    found = []
    for node in body:
        states = [n for n in node.all_input_nodes if n.name in program.states]
        moved = 0.0
        if sizes[node] and not getattr(node.target, "is_view", False):
            moved = sizes[node] + sum(sizes[n] for n in node.all_input_nodes if n not in states)
        held = sum(sizes[n] for n in states)
        found.append(
            2.0 * _products(node, sizes) + HELD_FLOPS * held + MOVED_FLOPS * moved,
        )
    return found


def _products(node: fx.Node, sizes: Mapping[fx.Node, float]) -> float:
    """Multiplications of a matmul-like op."""
    if not is_recurrent(node):
        return matmul(node)[0]
    features, *states = node.all_input_nodes
    steps = sizes[features] / at_batch(features.meta["val"].shape[-1], 1)
    return steps * sum(sizes[n] for n in states if n.meta["val"].ndim == 2)


def _elements(node: fx.Node) -> float:
    """Elements of a tensor for one sample; 0 for anything else."""
    value = node.meta.get("val")
    if not isinstance(value, Tensor):
        return 0.0
    return float(math.prod(at_batch(size, 1) for size in value.shape))
