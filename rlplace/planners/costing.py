"""What the parts of a search ask about one instance: estimates of plans, and solved stages."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from rlplace.cost.analytic import AnalyticCost
from rlplace.cost.types import CostModel
from rlplace.plan.types import Instance
from rlplace.planners.stage_solver import StageSolver
from rlplace.simulate.estimate import Estimator


@dataclass
class Costing:
    """An estimator and a stage solver on one cost model, so that nothing is costed twice.

    Args:
        instance: The question.
        cost: The cost model; one that reads a profile for instances that were made from it.
    """

    instance: Instance
    cost: CostModel = field(default_factory=AnalyticCost)

    @cached_property
    def estimator(self) -> Estimator:
        """Estimates plans."""
        return Estimator(self.instance, self.cost)

    @cached_property
    def solver(self) -> StageSolver:
        """Solves stages."""
        return StageSolver(self.instance, self.cost)
