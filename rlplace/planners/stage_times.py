"""How long every stage between two cuts takes, for programs that balance stages."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import numpy.typing as npt

from rlplace.plan.types import Mesh, Stage
from rlplace.plan.uniform import even_cuts
from rlplace.planners.stage_solver import StageSolver

Floats = npt.NDArray[np.float64]

_CUTS = 32


@dataclass
class StageTimes:
    """Stages of one micro-batch count.

    Args:
        solver: Solves stages.
        count: Micro-batches of a step.
        lean: Whether stages are taken at their leanest, also where they do not fit.
    """

    solver: StageSolver
    count: int
    lean: bool
    _seconds: dict[tuple[int, int], Floats] = field(default_factory=dict)

    @cached_property
    def cuts(self) -> npt.NDArray[np.int64]:
        """Groups at which stages may begin or end."""
        return even_cuts(self.solver.instance, _CUTS)

    def seconds(self, mesh: Mesh, behind: int) -> Floats:
        """(N, N) seconds of a stage by its first and last cut, with so many stages behind it.

        They are those of a micro-batch, with its part of what comes once a step.
        """
        held = min(self.count, behind + 1)
        key = (self.solver.mesh_class(mesh), held)
        if key not in self._seconds:
            seconds, _, tail, lean = self.solver.block(self.cuts, mesh, self.count, held)
            self._seconds[key] = (lean if self.lean else seconds) + tail / self.count
        return self._seconds[key]

    def stage(self, mesh: Mesh, first: int, last: int, behind: int) -> Stage:
        """The stage between two cuts, with so many stages behind it."""
        start, stop = int(self.cuts[first]), int(self.cuts[last])
        held = min(self.count, behind + 1)
        return Stage(start, stop, mesh, self.solver.choices(start, stop, mesh, self.count, held))
