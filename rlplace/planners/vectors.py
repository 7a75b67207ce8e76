"""Searches over vectors of decisions, each of a few options: by tables, by keys, and by a tree.

The loops that placers of op graphs and planners of instances share. Both say what a vector is worth
and which options are legal; what is best they keep themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import log, sqrt
from typing import Protocol

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

#: Vectors of a round of `settle`, the share of them that the table follows, and how far.
_ROUND, _ELITE_SHARE, _STEP = 200, 0.1, 0.3
#: Rounds where the budget does not end them, and the probability at which all is said.
_ROUNDS, _SURE = 400, 0.999
#: Chromosomes of `evolve`, of which so many are elite and so many new, and how often a child takes
#: after the elite parent.
_POPULATION, _ELITE, _NEW, _BIAS = 100, 20, 15, 0.7
#: Generations where the budget does not end them.
_GENERATIONS = 400
#: Episodes of `grow` where the budget does not end them, the weight of what is little known, and
#: how often a random decision stops.
_EPISODES, _EXPLORE, _STOPS = 20_000, 0.1, 0.02
#: The decision that ends an episode.
STOP = -1


class Looker(Protocol):
    """Values vectors within a budget."""

    @property
    def stopped(self) -> str | None:
        """Which part of the budget has run out, or None."""
        ...

    @property
    def left(self) -> int:
        """Evaluations that are left."""
        ...

    def look(self, vectors: Ints, /) -> Floats:
        """What vectors (N, V) are worth, the less the better (N,)."""
        ...


def settle(search: Looker, legal: Bools, rng: np.random.Generator) -> None:
    """Cross-entropy minimisation (Gao et al., NeurIPS 2018), until every decision is sure.

    Args:
        search: Values vectors.
        legal: Which options each decision has, (V, D).
        rng: The source of all randomness.
    """
    table = legal / legal.sum(axis=1, keepdims=True)
    for _ in range(_ROUNDS):
        drawn = draw(table, min(_ROUND, search.left), rng)
        values = search.look(drawn)
        if search.stopped or table.max(axis=1).min() > _SURE:
            break
        best = np.argsort(values, kind="stable")[: max(1, int(_ELITE_SHARE * len(drawn)))]
        followed = (drawn[best][:, :, None] == np.arange(table.shape[1])).mean(axis=0)
        table += _STEP * (followed - table)


def draw(table: Floats, count: int, rng: np.random.Generator) -> Ints:
    """Vectors by the table (count, V)."""
    below = np.cumsum(table, axis=1)
    below /= below[:, -1:]
    drawn = rng.random((count, len(table), 1)) >= below
    return np.asarray(drawn.sum(axis=2), np.int64)


def evolve(search: Looker, legal: Bools, rng: np.random.Generator) -> None:
    """Biased random keys (Gonçalves and Resende 2011): a decision takes its largest legal key.

    Args:
        search: Values vectors.
        legal: Which options each decision has, (V, D).
        rng: The source of all randomness.
    """
    keys = rng.random((min(_POPULATION, search.left), *legal.shape))
    values = search.look(decode(keys, legal))
    for _ in range(_GENERATIONS):
        if search.stopped:
            break
        order = np.argsort(values, kind="stable")
        keys, values = keys[order], values[order]
        born = offspring(keys, rng)[: search.left]
        found = search.look(decode(born, legal))
        keys = np.concatenate([keys[:_ELITE], born])
        values = np.concatenate([values[:_ELITE], found])


def offspring(keys: Floats, rng: np.random.Generator) -> Floats:
    """The new chromosomes of a generation: children, and random ones; `keys` are best first."""
    count, shape = _POPULATION - _ELITE - _NEW, keys.shape[1:]
    elite = min(_ELITE, len(keys))
    first = keys[rng.integers(elite, size=count)]
    # Of a population that is all elite, the other parent is one of them too.
    second = keys[rng.integers(elite if elite < len(keys) else 0, len(keys), size=count)]
    children = np.where(rng.random((count, *shape)) < _BIAS, first, second)
    return np.concatenate([children, rng.random((_NEW, *shape))])


def decode(keys: Floats, legal: Bools) -> Ints:
    """The vectors that chromosomes mean (N, V)."""
    return np.asarray(np.where(legal, keys, -1.0).argmax(axis=2), np.int64)


@dataclass
class Node:
    """What is known after some decisions.

    Args:
        visits: How often they were tried.
        total: The rewards that came.
        done: Whether all that can follow was tried.
        children: By the next decision.
    """

    visits: int = 0
    total: float = 0.0
    done: bool = False
    children: dict[int, Node] = field(default_factory=dict)


def grow(
    search: Looker, legal: Bools, default: Ints, order: Sequence[int], rng: np.random.Generator
) -> None:
    """Monte Carlo tree search: an episode decides some of the default anew, in an order.

    A reward is the value of the default over that of the episode.

    Args:
        search: Values vectors.
        legal: Which options each decision has, (V, D).
        default: What is taken where nothing is decided, (V,).
        order: In which decisions are made.
        rng: The source of all randomness.
    """
    worst = float(search.look(default[None])[0])
    options = [[STOP, *np.flatnonzero(legal[one]).tolist()] for one in order]
    root, places = Node(), np.array(order, np.int64)
    for _ in range(_EPISODES):
        if search.stopped or root.done:
            break
        path, decided = descend(root, options, rng)
        finish(path, options)
        vector = default.copy()
        vector[places[: len(decided)]] = decided
        value = float(search.look(vector[None])[0])
        reward = worst / value if value > 0.0 else 1.0
        for node in path:
            node.visits += 1
            node.total += reward


def descend(
    root: Node, options: list[list[int]], rng: np.random.Generator
) -> tuple[list[Node], Ints]:
    """An episode: the nodes that it passes, one of them new, and what it decides."""
    decided: list[int] = []
    path, node = [root], root
    for known in options:
        untried = [choice for choice in known if choice not in node.children]
        choice = untried[int(rng.integers(len(untried)))] if untried else best_child(node)
        node = node.children.setdefault(choice, Node())
        path.append(node)
        if choice == STOP:
            node.done = True
            return path, np.array(decided, np.int64)
        decided.append(choice)
        if untried:
            break
    for known in options[len(decided) :]:
        if rng.random() < _STOPS:
            break
        decided.append(known[1 + int(rng.integers(len(known) - 1))])
    return path, np.array(decided, np.int64)


def finish(path: Sequence[Node], options: Sequence[list[int]]) -> None:
    """Say of the nodes of an episode whether all that can follow was tried."""
    for depth in range(len(path) - 1, -1, -1):
        children, known = path[depth].children, options[depth] if depth < len(options) else []
        every = len(children) == len(known) and all(child.done for child in children.values())
        path[depth].done = path[depth].done or every


def best_child(node: Node) -> int:
    """The decision of the largest upper confidence bound, of those not done."""
    seen = log(node.visits)
    return max(
        (choice for choice, child in node.children.items() if not child.done),
        key=lambda choice: (
            node.children[choice].total / node.children[choice].visits
            + _EXPLORE * sqrt(seen / node.children[choice].visits)
        ),
    )
