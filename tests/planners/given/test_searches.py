"""The steps of the population and tree searches by hand."""

from __future__ import annotations

import numpy as np

from rlplace.graph.formats.doppler import read_doppler
from rlplace.graph.formats.giph import read_giph
from rlplace.planners.given.cross_entropy import cross_entropy
from rlplace.planners.given.event_search import EventSearch
from rlplace.planners.given.tree_search import tree_search
from rlplace.planners.types import Limits
from rlplace.planners.vectors import (
    STOP,
    Node,
    best_child,
    decode,
    descend,
    draw,
    finish,
    offspring,
)
from tests.graph.formats.examples import giph
from tests.planners.given.cases import random_doppler


def test_placements_are_drawn_as_the_table_says() -> None:
    table = np.array([[0.0, 1.0, 0.0], [0.25, 0.0, 0.75]])
    drawn = draw(table, 4000, np.random.default_rng(0))
    assert set(drawn[:, 0]) == {1}
    assert set(drawn[:, 1]) == {0, 2}
    assert abs((drawn[:, 1] == 2).mean() - 0.75) < 0.03


def test_a_table_settles_on_one_placement() -> None:
    found = cross_entropy(read_giph(giph(), "0/0"), Limits(), np.random.default_rng(0))
    assert (found.placement, found.value, found.stopped) == ((0, 0, 0, 0), 8.0, "done")


def test_a_chromosome_is_read_as_the_largest_legal_key() -> None:
    search = EventSearch("genetic", read_giph(giph(), "0/0"), Limits())
    keys = np.array([[[0.1, 0.9], [0.1, 0.9], [0.6, 0.5], [0.2, 0.3]]])
    # Op 1 may not run on device 1.
    assert decode(keys, search.legal).tolist() == [[1, 0, 0, 1]]


def test_children_take_after_the_elite_parent() -> None:
    # Elite keys are 1, the others 0; of 80 new chromosomes the first 65 are children.
    keys = np.concatenate([np.ones((20, 50, 2)), np.zeros((80, 50, 2))])
    born = offspring(keys, np.random.default_rng(0))
    assert born.shape == (80, 50, 2)
    children, new = born[:65], born[65:]
    assert set(np.unique(children)) == {0.0, 1.0}
    assert abs(children.mean() - 0.7) < 0.03
    assert abs(new.mean() - 0.5) < 0.03


def test_a_tree_is_done_when_all_was_tried() -> None:
    """Stop, or one of two options and then stop or the one option of the next: five leaves."""
    rng, root = np.random.default_rng(0), Node()
    options = [[STOP, 0, 1], [STOP, 0]]
    seen = set()
    for _ in range(20):
        if root.done:
            break
        path, decided = descend(root, options, rng)
        finish(path, options)
        seen.add(tuple(decided.tolist()))
        for node in path:
            node.visits += 1
    assert root.done
    assert seen == {(), (0,), (1,), (0, 0), (1, 0)}


def test_an_episode_grows_the_tree_by_one_node() -> None:
    rng, root = np.random.default_rng(0), Node()
    options = [[STOP, 0, 1], [STOP, 0]]
    for nodes in range(1, 4):
        path, decided = descend(root, options, rng)
        for node in path:
            node.visits += 1
        assert len(decided) <= 2
        assert _count(root) == nodes + 1


def _count(node: Node) -> int:
    return 1 + sum(_count(child) for child in node.children.values())


def test_what_is_better_or_less_known_is_chosen() -> None:
    node = Node(visits=20)
    node.children = {0: Node(10, 9.0), 1: Node(10, 8.0)}
    assert best_child(node) == 0
    node.children[1] = Node(1, 0.8)
    assert best_child(node) == 1


def test_the_tree_finds_that_two_devices_are_better_than_one() -> None:
    data = {"comp": [3e10, 2e10, 1e10], "comm": [0] * 3, "edges": [], "default_devices": 2}
    found = tree_search(
        read_doppler(data, "free"), Limits(evaluations=100), np.random.default_rng(0)
    )
    assert found.value == 3.0
    instance = random_doppler(np.random.default_rng(0), 10, 2)
    first = tree_search(instance, Limits(evaluations=1), np.random.default_rng(0))
    # The default: every device is the fastest, so the first one.
    assert first.placement == (0,) * 10
