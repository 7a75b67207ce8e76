"""Problems of public forms under their makers' own costs: what placers are compared on.

A placement is worth what the form's rule says (`rlplace.cost.given`), in the file's own unit; only
its ratios to other values of the same problem are compared, as with the step times of plans.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from rlplace.bench.types import Key, Trial, salt_of
from rlplace.cost.given import makespan_bound, piper_bound
from rlplace.cost.given.sailor_form import SailorInstance
from rlplace.graph.formats.types import EventCosts, GivenInstance, LoadCosts
from rlplace.planners.given.contiguous import load_bound
from rlplace.planners.given.registry import PLACERS, placers_of
from rlplace.planners.given.sailor import place_sailor
from rlplace.planners.given.types import Placed
from rlplace.planners.given.units import color_units
from rlplace.planners.types import Budget, Planner

Solver = Callable[[Any, Budget, np.random.Generator], Placed[Any]]

_SAILOR: dict[str, Solver] = {"sailor": place_sailor}

#: Every placer by name; of one name for several forms, that of the first.
ALL_PLACERS: dict[str, Solver] = dict(_SAILOR)
for _form in reversed(PLACERS.values()):
    ALL_PLACERS |= _form


@dataclass(frozen=True)
class PlacementProblem:
    """A problem of a public form.

    Args:
        suite: Name of the suite.
        name: Unique in the suite.
        make: Makes the question.
    """

    suite: str
    name: str
    make: Callable[[], GivenInstance | SailorInstance]

    @cached_property
    def instance(self) -> GivenInstance | SailorInstance:
        """The question."""
        return self.make()

    @cached_property
    def fingerprint(self) -> str:
        """Hash of all that the question consists of."""
        own = self.instance
        asked = [self.suite, self.name]
        if isinstance(own, SailorInstance):
            asked += [repr(own)]
        else:
            asked += [own.graph.fingerprint, repr(own.costs)]
        return hashlib.sha256(" ".join(asked).encode()).hexdigest()[:16]

    @cached_property
    def bound(self) -> float | None:
        """No placement is worth less; None where no such limit is known."""
        own = self.instance
        if isinstance(own, SailorInstance):
            return None
        if isinstance(own.costs, EventCosts):
            return makespan_bound(own)
        if isinstance(own.costs, LoadCosts):
            return load_bound(color_units(own), own.costs)
        return piper_bound(own)

    def solvers(
        self, planners: Mapping[str, Planner], placers: Collection[str]
    ) -> dict[str, Solver]:
        """Those of the placers that are for this form."""
        own = self.instance
        known = _SAILOR if isinstance(own, SailorInstance) else placers_of(own)
        return {name: known[name] for name in placers if name in known}

    def solve(self, placer: Solver, budget: Budget, seed: int) -> Placed[Any]:
        """What a placer finds; the seed and the name of the problem give the random numbers."""
        rng = np.random.default_rng((seed, salt_of(self.name)))
        return placer(self.instance, budget, rng)

    def trial(self, key: Key, solver: Solver, budget: Budget) -> Trial:
        """What a placer makes of it."""
        cpu = time.process_time()
        found = self.solve(solver, budget, key.seed)
        spent = time.process_time() - cpu
        return Trial(
            key,
            step_time=found.value if math.isfinite(found.value) else None,
            bound=self.bound,
            seconds=found.seconds,
            cpu_seconds=spent,
            evaluations=found.evaluations,
            stopped=found.stopped,
            curve=found.curve,
        )
