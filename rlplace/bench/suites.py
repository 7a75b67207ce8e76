"""The suites: frozen by seed, hashed, and apart from what policies are trained on.

=========== ==== ================================================================================
name        size what
=========== ==== ================================================================================
tiny        200  three to six groups on two to four devices; the optimum is known (`exhaustive`)
random      200  synthetic graphs of families and on device kinds that no policy is trained on;
                 every second cluster is mixed
real        120  the largest library model of each of 12 families that fits on each of 10 clusters
dag         40   the same for four families of models that branch
random-dev  200  synthetic graphs of families and on kinds that policies are trained on
public      62   graphs and profiles of peers under their own costs (`rlplace.bench.public`)
=========== ==== ================================================================================

Nothing is developed on `random`, `real` and `dag`: for that is `random-dev`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np

from rlplace.bench.public import PUBLIC, public
from rlplace.bench.real import BRANCHING, FAMILIES, Family, on_cluster, pairs
from rlplace.bench.tiny import tiny
from rlplace.bench.types import Problem, Question
from rlplace.envs.clusters import HELD_OUT_KINDS
from rlplace.envs.families import HELD_OUT_FAMILIES
from rlplace.envs.instances import InstanceGenerator, random_instance
from rlplace.errors import InputError, nearest_names
from rlplace.plan.degrees import spread
from rlplace.plan.types import Instance

_Asked = TypeVar("_Asked", bound=Question)
_SIZE = 200
_EVALUATION, _DEVELOPMENT = 0xE7A1, 0xDE7
_HELD_OUT = InstanceGenerator(families=tuple(HELD_OUT_FAMILIES), kinds=HELD_OUT_KINDS)


def suite(name: str, count: int | None = None) -> tuple[Problem, ...]:
    """The problems of a suite that is made here: any but `public`.

    Args:
        name: As above.
        count: Only so many, spread over the suite.

    Raises:
        InputError: If there is no such suite, or the count is below 1.
    """
    if name not in SUITES:
        known = (*SUITES, PUBLIC)
        rule = f"must be one of {', '.join(known)}"
        raise InputError("suite", name, rule, nearest_names(name, known))
    return _part(tuple(SUITES[name]()), count)


def questions(name: str, count: int | None, public_data: Path | None) -> tuple[Question, ...]:
    """The problems of any suite; see `suite`.

    Args:
        name: As above.
        count: Only so many, spread over the suite.
        public_data: Folder of the public data, for `public`.

    Raises:
        InputError: As `suite` and `public`.
    """
    if name == PUBLIC:
        return _part(tuple(public(public_data)), count)
    return suite(name, count)


def _part(problems: tuple[_Asked, ...], count: int | None) -> tuple[_Asked, ...]:
    if count is None:
        return problems
    if count < 1:
        raise InputError("count", count, "must be at least 1", 1)
    return spread(problems, min(count, len(problems)))


def fingerprint(problems: Sequence[Problem]) -> str:
    """Hash of some problems: equal for equal questions in the same order."""
    text = " ".join(problem.fingerprint for problem in problems)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _tiny() -> Iterator[Problem]:
    for index in range(_SIZE):
        yield Problem("tiny", f"tiny {index}", partial(tiny, index))


def _random(name: str, generator: InstanceGenerator, salt: int) -> Iterator[Problem]:
    for index in range(_SIZE):
        make = partial(_drawn, generator, salt, index)
        yield Problem(name, f"{name} {index}", make)


def _drawn(generator: InstanceGenerator, salt: int, index: int) -> Instance:
    rng = np.random.default_rng([salt, index])
    return random_instance(rng, generator, mixed=bool(index % 2))


def _library(name: str, families: Sequence[Family]) -> Iterator[Problem]:
    for title, family, cluster in pairs(families):
        yield Problem(name, title, partial(on_cluster, family, cluster))


SUITES: dict[str, Callable[[], Iterator[Problem]]] = {
    "tiny": _tiny,
    "random": partial(_random, "random", _HELD_OUT, _EVALUATION),
    "real": partial(_library, "real", FAMILIES),
    "dag": partial(_library, "dag", BRANCHING),
    "random-dev": partial(_random, "random-dev", InstanceGenerator(), _DEVELOPMENT),
}
