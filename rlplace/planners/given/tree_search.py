"""Monte Carlo tree search over decisions op by op.

automap (Schaarschmidt et al. 2021, arXiv 2112.02958), with UCT (Kocsis and Szepesvári 2006). An
episode begins with a default placement; each decision gives the next op a device or stops, which
leaves the rest as it is; only the end of an episode is valued. The tree grows by one node an
episode, below it decisions are random. Decision space: all placements, in principle; in practice
those that differ from the default in what is decided first. Complexity: O(V D) an episode beside
the simulation.

automap decides the shardings of arguments and lets them spread; here an op gets a device. Its
learned ranking of what is worth a decision is left out: the ops go by their work, largest first.
The default is that each op runs where it is fastest.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import log, sqrt

import numpy as np

from rlplace.cost.given.event_loop import Ints
from rlplace.graph.formats.types import GivenInstance
from rlplace.planners.given.event_search import EventSearch
from rlplace.planners.given.ranks import mean_times
from rlplace.planners.given.types import Placed, Placement
from rlplace.planners.types import Limits

#: Episodes where the budget does not end them, the weight of what is little known, and how often a
#: random decision stops.
_EPISODES, _EXPLORE, _STOP = 20_000, 0.1, 0.02
#: The decision that ends an episode.
STOP = -1


@dataclass
class _Node:
    """What is known after some decisions: how often it was tried, and the rewards that came."""

    visits: int = 0
    total: float = 0.0
    children: dict[int, _Node] = field(default_factory=dict)


def tree_search(
    instance: GivenInstance, budget: Limits, rng: np.random.Generator
) -> Placed[Placement]:
    """The best placement of all episodes; a reward is the default's makespan over the episode's."""
    search = EventSearch("tree_search", instance, budget)
    default = np.argmin(search.arrays.times, axis=1).astype(np.int64)
    order = np.argsort(-mean_times(search.arrays), kind="stable")
    worst = float(search.look(default[None])[0])
    options = [[STOP, *np.flatnonzero(legal).tolist()] for legal in search.legal[order]]
    root = _Node()
    for _ in range(_EPISODES):
        if search.stopped:
            break
        path, decided = _descend(root, options, rng)
        placement = default.copy()
        placement[order[: len(decided)]] = decided
        guide = float(search.look(placement[None])[0])
        reward = worst / guide if guide > 0.0 else 1.0
        for node in path:
            node.visits += 1
            node.total += reward
    return search.result()


def _descend(
    root: _Node, options: list[list[int]], rng: np.random.Generator
) -> tuple[list[_Node], Ints]:
    """An episode: the nodes that it passes, one of them new, and the devices that it decides."""
    decided: list[int] = []
    path, node = [root], root
    for known in options:
        untried = [choice for choice in known if choice not in node.children]
        choice = untried[int(rng.integers(len(untried)))] if untried else _best_child(node)
        node = node.children.setdefault(choice, _Node())
        path.append(node)
        if choice == STOP:
            return path, np.array(decided, np.int64)
        decided.append(choice)
        if untried:
            break
    for known in options[len(decided) :]:
        if rng.random() < _STOP:
            break
        decided.append(known[1 + int(rng.integers(len(known) - 1))])
    return path, np.array(decided, np.int64)


def _best_child(node: _Node) -> int:
    """The decision of the largest upper confidence bound."""
    seen = log(node.visits)
    return max(
        node.children,
        key=lambda choice: (
            node.children[choice].total / node.children[choice].visits
            + _EXPLORE * sqrt(seen / node.children[choice].visits)
        ),
    )
