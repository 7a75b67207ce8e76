"""The planners of a comparison: those that search, and the policy."""

from __future__ import annotations

from collections.abc import Iterable

from rlplace.envs.builders.stagewise import StagewiseBuilder
from rlplace.errors import InputError, nearest_names
from rlplace.planners.registry import PLANNERS
from rlplace.planners.types import Planner
from rlplace.policies.planner import policy_planner
from rlplace.policies.store import load_numpy_policy
from rlplace.resources import resource

#: Name of the shipped policy among the planners, and of all together.
POLICY, ALL = "policy", "all"


def planners(names: Iterable[str]) -> dict[str, Planner]:
    """Planners by name; `ALL` stands for every one there is.

    Raises:
        InputError: If there is none of a name; with the nearest.
    """
    every = (*PLANNERS, POLICY)
    return {one: _planner(one) for name in names for one in (every if name == ALL else (name,))}


def _planner(name: str) -> Planner:
    if name == POLICY:
        return policy_planner(
            load_numpy_policy(resource("checkpoints/default")), StagewiseBuilder()
        )
    known = (*PLANNERS, POLICY)
    if name not in known:
        raise InputError(
            "planner", name, f"must be one of {', '.join(known)}", nearest_names(name, known)
        )
    return PLANNERS[name]
