"""What a plan says of each parameter of one rank: its level, its uses, its optimizer settings."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from rlplace.graph.types import Placement, Shard
from rlplace.plan.types import GroupChoice, Mesh, Plan
from rlplace.runtime.cuts import Trained
from rlplace.runtime.model import Model
from rlplace.runtime.parts import StageModule
from rlplace.runtime.weight_slices import WeightSlice

#: From a fully qualified name and a parameter to the optimizer's settings for it.
Settings = Callable[[str, nn.Parameter], Mapping[str, Any]]


@dataclass(frozen=True)
class Ranked:
    """Where a rank is.

    Args:
        mesh: Its mesh.
        tp_rank: Its coordinate on the tp axis.
        counted_elsewhere: Names of shared parameters that another mesh counts in the norm.
    """

    mesh: Mesh
    tp_rank: int
    counted_elsewhere: frozenset[str] = frozenset()


def trained(
    stages: Mapping[int, StageModule],
    plan: Plan,
    model: Model,
    place: Ranked,
    placements: Mapping[str, Placement],
    settings: Settings | None = None,
) -> list[Trained]:
    """The parameters of a rank, last used first: trained ones, and frozen ones of ZeRO-3.

    Args:
        stages: The rank's stages by index.
        plan: The plan.
        model: The model.
        place: Where the rank is.
        placements: How each state is held on the tp axis.
        settings: Of the optimizer.
    """
    choices = _choices(plan, model, place.mesh)
    found = []
    for key, (param, uses) in _uses(stages).items():
        name = WeightSlice.of(key).name
        zero = min(choice.zero for choice in choices[name])
        if not param.requires_grad and zero < 3:
            continue
        own = settings(name, param) if settings is not None and param.requires_grad else {}
        alone = isinstance(placements[name], Shard) or place.tp_rank == 0
        found.append(
            Trained(
                param,
                uses,
                zero,
                all(choice.offload for choice in choices[name]),
                tuple(sorted(own.items())),
                alone and name not in place.counted_elsewhere,
            )
        )
    return found


def _uses(
    stages: Mapping[int, StageModule],
) -> dict[str, tuple[nn.Parameter, tuple[tuple[int, int], ...]]]:
    """Parameters and slices by key with the (stage, step) that use them, last used first."""
    names = {id(p): name for stage in stages.values() for name, p in stage.named_parameters()}
    found: dict[str, tuple[nn.Parameter, tuple[tuple[int, int], ...]]] = {}
    for index, step, param in _reversed_states(stages):
        name = names[id(param)]
        _, before = found.get(name, (param, ()))
        if (index, step) not in before:
            found[name] = (param, (*before, (index, step)))
    return found


def _reversed_states(
    stages: Mapping[int, StageModule],
) -> Iterator[tuple[int, int, nn.Parameter]]:
    for index in sorted(stages, reverse=True):
        steps = stages[index].states_of_steps
        for step in reversed(range(len(steps))):
            for state in reversed(steps[step]):
                if isinstance(state, nn.Parameter):
                    yield index, step, state


def _choices(plan: Plan, model: Model, mesh: Mesh) -> dict[str, list[GroupChoice]]:
    """What the groups that use a parameter on a mesh chose."""
    found: dict[str, list[GroupChoice]] = {}
    for stage in plan.stages:
        groups: Iterable[Any] = (
            model.graph.groups[stage.start : stage.stop] if stage.mesh == mesh else ()
        )
        for group, choice in zip(groups, stage.choices, strict=False):
            for name in group.params:
                found.setdefault(name, []).append(choice)
    return found
