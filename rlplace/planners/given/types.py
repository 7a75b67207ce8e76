"""What is asked of a public op-graph file, and answered: the protocol that every placer obeys."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import numpy as np

from rlplace.graph.formats.types import GivenInstance
from rlplace.planners.types import Limits

#: What is decided: the device of each group (`Placement`), or what else a form calls a plan.
Decision = TypeVar("Decision", covariant=True)
Placement = tuple[int, ...]


@dataclass(frozen=True)
class Placed(Generic[Decision]):
    """What a placer found.

    Args:
        placement: The best placement, by group; None if none that it looked at is legal.
        value: Its value by the form's own rule (`rlplace.cost.given`), infinite without one.
        placer: Name of the placer.
        evaluations: Placements that were looked at.
        seconds: Wall seconds.
        stopped: Why it stopped: ``done``, ``seconds`` or ``evaluations``.
        curve: (seconds, value) at each improvement.
    """

    placement: Decision | None
    value: float
    placer: str
    evaluations: int
    seconds: float
    stopped: str = "done"
    curve: tuple[tuple[float, float], ...] = ()


class Placer(Protocol[Decision]):
    """Anything that places the groups of a public op-graph file."""

    def __call__(
        self, instance: GivenInstance, budget: Limits, rng: np.random.Generator
    ) -> Placed[Decision]:
        """The best placement within the budget; same seed and evaluations, same placement.

        Args:
            instance: The question.
            budget: What the search may spend.
            rng: The source of all randomness.

        Raises:
            InputError: If the placer is not for the form of the instance.
        """
        ...
