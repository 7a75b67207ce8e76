"""Which tensors cross the border between two stages, with shapes that are known beforehand.

A tensor that a stage far downstream reads is relayed by every stage in between, so each border
is crossed by all tensors that are made before it and read behind it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import fx

from rlplace.errors import InputError
from rlplace.graph.neighbours import context_layouts
from rlplace.graph.program import Program
from rlplace.graph.sharding.strategy import REPLICATE
from rlplace.graph.tracing.regions import stops_gradient
from rlplace.graph.types import Layout, OpGraph, Placement, Replicate
from rlplace.plan.types import Mesh, Plan, Stage

#: The axes of a mesh that cut activations between groups.
AxisName = Literal["cp", "tp"]
AXES: tuple[AxisName, ...] = get_args(AxisName)


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

    @property
    def mixed(self) -> bool:
        """Whether its samples cannot be told apart: not one dim alone is made of them."""
        lines = [size for size in self.sizes if size.per_sample]
        return len(lines) > 1 or any(size.base for size in lines)

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


@dataclass(frozen=True, slots=True)
class Form:
    """How the ranks of a stage hold a tensor, on each axis that cuts activations.

    Args:
        cp, tp: On each of them; where both cut the same dim, tp cuts what cp leaves.
    """

    cp: Placement = REPLICATE
    tp: Placement = REPLICATE


WHOLE = Form()


def forms(
    graph: OpGraph, plan: Plan, crossing: Sequence[Sequence[fx.Node]]
) -> list[dict[str, Form]]:
    """In which form each stage holds the tensors that it gets, relays and gives, by name.

    A stage gets a tensor as its groups read it, and whole where they read it in several ways (they
    cut it themselves); it gives what it makes as the maker writes it. What it only relays stays as
    it was where the two meshes have the same cp and tp, and is whole otherwise. A gradient has the
    form of its tensor.

    Args:
        graph: The model.
        plan: The plan.
        crossing: Nodes that cross each border (`borders`).
    """
    by_cp, by_tp = (_placements(graph, plan, crossing, axis) for axis in AXES)
    return [
        {name: Form(own[name], other[name]) for name in own}
        for own, other in zip(by_cp, by_tp, strict=True)
    ]


def _placements(
    graph: OpGraph, plan: Plan, crossing: Sequence[Sequence[fx.Node]], axis: AxisName
) -> list[dict[str, Placement]]:
    """The part of `forms` of one axis."""
    found: list[dict[str, Placement]] = []
    for index, stage in enumerate(plan.stages):
        layouts = layouts_of(graph, stage, axis)
        before = found[-1] if index else {}
        alike = bool(index) and _inner(stage.mesh) == _inner(plan.stages[index - 1].mesh)
        own: dict[str, Placement] = {}
        for node in crossing[index - 1] if index else ():
            readings = _readings(graph, layouts, node.name)
            relayed = before[node.name] if alike and not readings else Replicate()
            own[node.name] = readings.pop() if len(readings) == 1 else relayed
        for group, layout in layouts.items():
            writes = layout.writes or (Replicate(),) * len(graph.groups[group].writes)
            own |= dict(zip(graph.groups[group].writes, writes, strict=True))
        leaving = crossing[index] if index + 1 < len(plan.stages) else ()
        found.append(own | {n.name: own.get(n.name, Replicate()) for n in leaving})
    return found


def _inner(mesh: Mesh) -> tuple[int, int]:
    return mesh.cp, mesh.tp


def layouts_of(graph: OpGraph, stage: Stage, axis: AxisName) -> dict[int, Layout]:
    """The layout of each group of a stage on an axis; on cp those which cut sequences."""
    groups = range(stage.start, stage.stop)
    if axis == "cp":
        every = context_layouts(graph, stage.mesh.cp)
        return {group: every[group] for group in groups}
    found = {}
    for group, choice in zip(groups, stage.choices, strict=True):
        legal = graph.structure(group).layouts_with("tp", stage.mesh.tp)
        found[group] = next(layout for layout in legal if layout.name == choice.layout)
    return found


def _readings(graph: OpGraph, layouts: Mapping[int, Layout], tensor: str) -> set[Placement]:
    """The placements in which some groups read a tensor."""
    found: set[Placement] = set()
    for group, layout in layouts.items():
        names = graph.reads(group)
        if tensor in names:
            found.add(layout.reads[names.index(tensor)] if layout.reads else Replicate())
    return found


def specs(program: Program, nodes: Sequence[fx.Node]) -> tuple[TensorSpec, ...]:
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


def numbers(nodes: Sequence[fx.Node]) -> dict[str, Size]:
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
