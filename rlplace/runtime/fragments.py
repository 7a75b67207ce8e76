"""What one rank alone steps of each parameter, under names that do not depend on the plan.

A checkpoint is written from fragments and read into them: those of all ranks together are every
parameter of the model with its optimizer state, however the plan has cut them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from rlplace.graph.types import Placement
from rlplace.runtime.stepped import Run

#: What states that count something, or a product, are before the first step; others are zero.
_FIRST = {"mu_product": 1.0}


@dataclass(frozen=True)
class Fragment:
    """A run of a parameter.

    Args:
        name: Fully qualified name of the parameter.
        shape: Shape of the whole parameter.
        placement: How the tp axis of this rank holds it.
        rank, size: Coordinate and size of that axis.
        start, stop: The run's part of the elements of the axis's local tensor, flattened.
        values: Flat tensors of ``stop - start`` elements, views that may be written into:
            ``weight`` (the fp32 master copy, where there is one) and the optimizer's states of the
            same shape by their own names.
        numbers: States of the optimizer that are single numbers (``step``), as tensors, which runs
            of one flat shard share; also states of another shape (Adafactor's rows and columns),
            which only whole parameters have.
    """

    name: str
    shape: tuple[int, ...]
    placement: Placement
    rank: int
    size: int
    start: int
    stop: int
    values: Mapping[str, Tensor]
    numbers: Mapping[str, Tensor]


@dataclass(frozen=True)
class Held:
    """A parameter, or a slice of one that begins at `start`, by its name: see `Fragment`."""

    name: str
    shape: tuple[int, ...]
    placement: Placement
    rank: int = 0
    size: int = 1
    start: int = 0


def fragments(
    runs: Iterable[Run], held: Mapping[int, Held], optimizer: torch.optim.Optimizer | None
) -> list[Fragment]:
    """The runs of a rank with the states that its optimizer has by now.

    Args:
        runs: What the optimizer steps.
        held: Each parameter, by its id.
        optimizer: None where nothing is trained.
    """
    return [_fragment(run, held[id(run.param)], optimizer) for run in runs]


def make_states(optimizer: torch.optim.Optimizer) -> None:
    """Make the states that an optimizer makes in its first step, so that they can be filled.

    It steps zeros with zero gradients, and the weights are put back; what has states keeps them.
    """
    params = [param for group in optimizer.param_groups for param in group["params"]]
    if any(optimizer.state.get(param) for param in params):
        return
    kept = [(param.detach().clone(), param.grad) for param in params]
    with torch.no_grad():
        for param in params:
            param.zero_()
            param.grad = torch.zeros_like(param)
        optimizer.step()
        for param, (weight, gradient) in zip(params, kept, strict=True):
            param.copy_(weight)
            param.grad = gradient
            for name, state in optimizer.state[param].items():
                if isinstance(state, Tensor) and (name == "step" or name in _FIRST):
                    state.fill_(_FIRST.get(name, 0.0))


def _fragment(run: Run, held: Held, optimizer: torch.optim.Optimizer | None) -> Fragment:
    values, numbers = {"weight": run.of(run.stepped.detach())}, {}
    states = optimizer.state.get(run.stepped, {}) if optimizer is not None else {}
    for name, state in states.items():
        if not isinstance(state, Tensor):
            continue
        if state.shape == run.stepped.shape and state.ndim:
            values[name] = run.of(state)
        else:
            numbers[name] = state
    return Fragment(
        held.name,
        held.shape,
        held.placement,
        held.rank,
        held.size,
        held.start + run.start,
        held.start + run.stop,
        values,
        numbers,
    )
