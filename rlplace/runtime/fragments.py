"""What one rank alone steps of each parameter, under names that do not depend on the plan.

A checkpoint is written from fragments and read into them: those of all ranks together are every
parameter of the model with its optimizer state, however the plan has cut them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from rlplace.graph.types import Placement


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
        numbers: States of the optimizer that are single numbers (``step``), as tensors.
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
