"""Branches that run side by side inside a region in which several tensors stay alive.

An anchor that depends on no other anchor of the region starts a branch; what follows from it alone
belongs to it. What is then concatenated or added up are branches (of an Inception cell, of a block
that runs attention and MLP in parallel, a shortcut with a convolution). What any other op brings
together are the factors of one thing (q and k, a gate and what it gates) and stays together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

from torch import fx

from rlplace.graph.groups.alive import Gap, Position
from rlplace.graph.groups.anchors import JOINS, SUMS, is_lookup, kind

#: A summand with a smaller share of the region's cost is part of what it is added to (a time
#: embedding).
LEAST_SHARE = 0.1


class Branches:
    """Which branches each node of a region depends on.

    Args:
        region: Its nodes, in order.
        anchors: The anchors among them, in order.
        costs: Cost of each node.
        most: What has more anchors than this is no single thing.
    """

    def __init__(
        self,
        region: Sequence[fx.Node],
        anchors: Sequence[fx.Node],
        costs: Mapping[fx.Node, float],
        most: int,
    ) -> None:
        self._region, self._anchors, self._costs, self._most = region, anchors, costs, most
        self._rank = {node: index for index, node in enumerate(region)}
        self._roots: dict[fx.Node, frozenset[fx.Node]] = {}
        self._parent: dict[fx.Node, fx.Node] = {}
        #: Ranks between which the factors of one thing lie.
        self._fused: list[tuple[int, int]] = []
        starts = set(anchors)
        for node in region:
            sources = [self._roots[s] for s in node.all_input_nodes if s in self._roots]
            roots = frozenset(root for found in sources for root in found)
            if node in starts and not roots:
                self._parent[node] = node
                roots = frozenset([node])
            self._roots[node] = roots
        for node in region:
            if kind(node) not in JOINS | SUMS:
                self._unite_factors(node)
        for node in region:
            if kind(node) in SUMS:
                self._unite_summands(node)

    def cuts(self, gaps: Sequence[Gap]) -> list[Position]:
        """Where branches begin and end; empty if there are none."""
        found = []
        for gap in gaps:
            left, right = (self._of(node) for node in (gap.left, gap.right))
            if left != right:
                found.append(gap.best if left < right else self._end(gap))
        return found

    def parts_factors(self, gap: Gap) -> bool:
        """Whether a cut there would part the factors of one thing."""
        left, right = self._rank[gap.left], self._rank[gap.right]
        return any(first <= left and right <= last for first, last in self._fused)

    def _of(self, node: fx.Node) -> frozenset[fx.Node]:
        """The branches that a node depends on, each named by one of its first anchors."""
        return frozenset(self._find(root) for root in self._roots[node])

    def _end(self, gap: Gap) -> Position:
        """The first position after the last op that depends on the branch before."""
        own = self._of(gap.left)
        nodes = self._region[self._rank[gap.left] : self._rank[gap.right]]
        tail = max(i for i, node in enumerate(nodes) if own & self._of(node))
        return next((p for p in gap.legal if p.index - gap.start > tail), gap.best)

    def _find(self, root: fx.Node) -> fx.Node:
        while self._parent[root] is not root:
            root = self._parent[root]
        return root

    def _unite(self, roots: frozenset[fx.Node]) -> None:
        for first, second in pairwise(sorted(roots, key=self._rank.__getitem__)):
            self._parent[self._find(second)] = self._find(first)

    def _unite_factors(self, node: fx.Node) -> None:
        sources = {self._roots[s] for s in node.all_input_nodes if self._roots.get(s)}
        if len(sources) > 1:
            self._unite(self._roots[node])
            first, last = min(self._rank[root] for root in self._roots[node]), self._rank[node]
            if sum(first <= self._rank[n] <= last for n in self._anchors) <= self._most:
                self._fused.append((first, last))

    def _unite_summands(self, node: fx.Node) -> None:
        sources = [self._of(s) for s in node.all_input_nodes if self._roots.get(s)]
        if len(sources) == 2:
            own = (sources[0] - sources[1], sources[1] - sources[0])
            if all(own) and not self._are_branches(own):
                self._unite(own[0] | own[1])

    def _are_branches(self, summands: Sequence[frozenset[fx.Node]]) -> bool:
        """Whether both summands are worth a group and one of them is more than a single op."""
        parts = [[node for node in self._anchors if self._of(node) <= own] for own in summands]
        if any(is_lookup(node) for part in parts for node in part):
            return False
        costs = [sum(self._costs[node] for node in part) for part in parts]
        least = LEAST_SHARE * sum(self._costs[node] for node in self._anchors)
        return min(costs) >= least and max(map(len, parts)) > 1
