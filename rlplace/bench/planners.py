"""The planners of a comparison: those that search, and the policy."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from rlplace.bench.placements import ALL_PLACERS
from rlplace.envs.builders.stagewise import StagewiseBuilder
from rlplace.errors import InputError, nearest_names
from rlplace.planners.registry import PLANNERS
from rlplace.planners.types import Planner
from rlplace.policies.planner import policy_planner
from rlplace.policies.store import load_numpy_policy
from rlplace.resources import resource

#: Name of the shipped policy among the planners, and of all together.
POLICY, ALL = "policy", "all"


#: Whatever can be named.
_KNOWN = tuple(dict.fromkeys((*PLANNERS, POLICY, *ALL_PLACERS, ALL)))


def planners(names: Iterable[str]) -> dict[str, Planner]:
    """Planners by name, without names that only placers have; `ALL` is every one there is.

    Raises:
        InputError: If neither a planner nor a placer has a name; with the nearest.
    """
    every = (*PLANNERS, POLICY)
    return {name: _planner(name) for name in _named(names, every)}


def placers(names: Iterable[str]) -> tuple[str, ...]:
    """The names of placers among names, `ALL` for every one there is.

    Raises:
        InputError: As `planners`.
    """
    return tuple(_named(names, tuple(ALL_PLACERS)))


def _named(names: Iterable[str], every: Sequence[str]) -> Iterator[str]:
    for name in names:
        if name not in _KNOWN:
            rule = f"must be one of {', '.join(_KNOWN)}"
            raise InputError("planner", name, rule, nearest_names(name, _KNOWN))
        if name in every:
            yield name
        elif name == ALL:
            yield from every


def _planner(name: str) -> Planner:
    if name == POLICY:
        return policy_planner(
            load_numpy_policy(resource("checkpoints/default")), StagewiseBuilder()
        )
    return PLANNERS[name]
