"""Which tensors cross the border between two stages, with shapes that are known beforehand.

A tensor that a stage far downstream reads is relayed by every stage in between, so each border
is crossed by all tensors that are made before it and read behind it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import fx

from rlplace.errors import InputError
from rlplace.graph.program import Program
from rlplace.graph.tracing.regions import stops_gradient
from rlplace.graph.types import OpGraph
from rlplace.plan.types import Plan


@dataclass(frozen=True, slots=True)
class Size:
    """A tensor dim: ``base + per_sample * samples``."""

    base: int
    per_sample: int = 0

    def __call__(self, samples: int) -> int:
        """The dim for a number of samples."""
        return self.base + self.per_sample * samples


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor of the exported program.

    Args:
        name: The node that makes it.
        sizes: Its dims.
        dtype: Its dtype.
        grad: Whether a gradient comes back for it: a float tensor that depends on a trainable
            parameter.
    """

    name: str
    sizes: tuple[Size, ...]
    dtype: torch.dtype
    grad: bool

    @property
    def batch_dim(self) -> int | None:
        """The dim that holds the samples, or None if every replica has the same tensor."""
        return next((i for i, size in enumerate(self.sizes) if size.per_sample), None)

    def shape(self, samples: int) -> tuple[int, ...]:
        """Shape for a number of samples."""
        return tuple(size(samples) for size in self.sizes)


def size_of(value: int | torch.SymInt, name: str) -> Size:
    """A dim of an exported tensor as a line in the batch size.

    Raises:
        InputError: If the dim depends on data, or not linearly on the batch.
    """
    if not isinstance(value, torch.SymInt):
        return Size(int(value))
    expression = value.node.expr
    points = []
    for batch in (2, 3, 5):
        known = expression.xreplace({symbol: batch for symbol in expression.free_symbols})
        points.append(int(known))
    slope = points[1] - points[0]
    line = Size(points[0] - 2 * slope, slope)
    if line(5) != points[2]:
        rule = f"{name} crosses stages, but its size {expression} is not linear in the batch"
        raise InputError("plan.stages", str(expression), rule)
    return line


def stage_of(graph: OpGraph, plan: Plan) -> dict[str, int]:
    """The stage of every op of the body."""
    owners: dict[str, int] = {}
    for index, stage in enumerate(plan.stages):
        for group in graph.groups[stage.start : stage.stop]:
            owners.update(dict.fromkeys(group.ops, index))
    return owners


def borders(program: Program, owners: Mapping[str, int], stages: int) -> list[list[fx.Node]]:
    """The nodes that cross each border; border i is between stages i and i + 1.

    The program's outputs count as read by the last stage. Numbers (sizes) cross too: each stage
    works them out itself.
    """
    crossing: list[list[fx.Node]] = [[] for _ in range(stages - 1)]
    for node in program.body():
        readers = [owners[user.name] for user in node.users if user.name in owners]
        if node.name in program.outputs:
            readers.append(stages - 1)
        for border in range(owners[node.name], max(readers, default=0)):
            crossing[border].append(node)
    return crossing


def specs(program: Program, nodes: list[fx.Node]) -> tuple[TensorSpec, ...]:
    """The tensors among some nodes.

    Raises:
        InputError: If a node makes something that is neither a tensor nor a number.
    """
    needs = needs_gradient(program)
    found = []
    for node in nodes:
        value = node.meta["val"]
        if isinstance(value, torch.Tensor):
            sizes = tuple(size_of(size, node.name) for size in value.shape)
            found.append(TensorSpec(node.name, sizes, value.dtype, node.name in needs))
        elif not isinstance(value, int | torch.SymInt):
            rule = f"{node.name} is a {type(value).__name__}; only tensors and sizes cross stages"
            raise InputError("plan.stages", node.name, rule)
    return tuple(found)


def numbers(nodes: list[fx.Node]) -> dict[str, Size]:
    """The sizes among some nodes."""
    return {
        node.name: size_of(node.meta["val"], node.name)
        for node in nodes
        if isinstance(node.meta["val"], int | torch.SymInt)
    }


def needs_gradient(program: Program) -> set[str]:
    """Float nodes, and states, that depend on a trainable parameter or are one."""
    needs = {name for name, target in program.states.items() if target in program.trainable}
    for node in program.exported.graph.nodes:
        value = node.meta.get("val")
        floats = not isinstance(value, torch.Tensor) or value.dtype.is_floating_point
        flows = floats and not stops_gradient(node)
        if flows and any(source.name in needs for source in node.all_input_nodes):
            needs.add(node.name)
    return needs
