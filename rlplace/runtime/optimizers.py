"""Which optimizers may step parts of parameters, and which need whole ones."""

from __future__ import annotations

import torch
from torch import nn

from rlplace.errors import InputError
from rlplace.graph.types import OpGraph
from rlplace.plan.types import Plan, Stage
from rlplace.runtime.assemble import OptimizerFactory

#: They work element by element, so that a part of a parameter is stepped as the whole would be.
ELEMENTWISE = (
    torch.optim.Adadelta,
    torch.optim.Adagrad,
    torch.optim.Adam,
    torch.optim.Adamax,
    torch.optim.AdamW,
    torch.optim.ASGD,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.SGD,
)


def check_optimizer(plan: Plan, graph: OpGraph, make: OptimizerFactory, grouped: bool) -> None:
    """Refuse an optimizer that cannot step what a plan gives it.

    An optimizer of one's own says with an attribute ``elementwise = True`` that it works element
    by element.

    Args:
        plan: The plan.
        graph: Its graph.
        make: Makes the optimizer.
        grouped: Whether it gets parameter groups.

    Raises:
        InputError: If it needs a closure, or whole parameters where the plan cuts them.
    """
    stand_in = nn.Parameter(torch.zeros(1, 1))
    optimizer = make([{"params": [stand_in]}] if grouped else [stand_in])
    name = type(optimizer).__name__
    if isinstance(optimizer, torch.optim.LBFGS):
        raise InputError("optimizer", name, "it runs the model again within a step", "AdamW")
    if isinstance(optimizer, ELEMENTWISE) or getattr(optimizer, "elementwise", False):
        return
    for index, stage in enumerate(plan.stages):
        for at, choice in enumerate(stage.choices):
            group = graph.groups[stage.start + at]
            if not group.params:
                continue
            rule = f"{name} needs whole parameters, and {group.name} has parts of them"
            field = f"plan.stages[{index}].choices[{at}]"
            if choice.zero and stage.mesh.shards > 1:
                raise InputError(f"{field}.zero", choice.zero, rule, 0)
            if _cuts(graph, stage, at):
                raise InputError(f"{field}.layout", choice.layout, rule, "replicate")


def _cuts(graph: OpGraph, stage: Stage, at: int) -> bool:
    """Whether the layout of a group cuts parameters."""
    if stage.mesh.tp == 1:
        return False
    layouts = graph.structure(stage.start + at).layouts_with("tp", stage.mesh.tp)
    own = next(layout for layout in layouts if layout.name == stage.choices[at].layout)
    return any(placement.kind == "shard" for placement in own.params)
