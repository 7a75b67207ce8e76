"""The cheapest way to run a piece on the tp axis: one strategy for each of its nodes.

Each node runs by one of the strategies that `rlplace.graph.rules` allows. The search goes node
after node and keeps the cheapest choice for each way in which the values that are still needed may
be held: a dynamic program, exact but for the width of its beam. The cost is a nominal one, in
FLOPs: local matmul FLOPs forward and backward, elements moved, parameters held and elements in
collectives, forward and backward.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, fx

from rlplace.graph.lower import Assignment, route
from rlplace.graph.matmuls import matmul
from rlplace.graph.nodes import (
    RESHAPES,
    SPLITS,
    op_name,
    run_count,
    tensor_args,
    written_args,
)
from rlplace.graph.program import Piece
from rlplace.graph.rules import (
    REPLICATE,
    Copied,
    Strategy,
    Want,
    divides,
    strategies,
)
from rlplace.graph.shapes import at_batch
from rlplace.graph.types import Partial, Placement, Replicate, Shard

#: An element that is read or written costs this share of one in a collective.
MOVE_SHARE = 1.0 / 15.0
#: FLOPs that a parameter held is worth.
HELD_FLOPS = 20.0
#: How much dearer it is to gather a state, in every micro-batch, than an activation: a last resort.
GATHERED_STATE = 100.0
#: Partial choices that are kept after each node.
BEAM = 64

_REARRANGES = RESHAPES | {"transpose", "t", "permute", "to", "clone", "expand"}
_MOVES_NOTHING = _REARRANGES | SPLITS | {"getitem", "slice", "select", "unbind", "detach", "alias"}


@dataclass(frozen=True)
class Facts:
    """What the search needs to know of a piece, worked out once.

    Args:
        degree: Size of the tp axis.
        nodes: Calls, in order.
        outputs: Nodes that the piece returns.
        states: Placeholders of states -> fixed placement, or None where it is free.
        sizes: Float elements of each value, 0 for other dtypes.
        grads: Nodes that a gradient flows back to.
        flops: Matmul FLOPs of each node, forward and backward.
        options: Strategies of each node.
        last: Index of the last node that reads each value.
    """

    degree: int
    nodes: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]
    states: dict[fx.Node, Placement | None]
    sizes: dict[fx.Node, float]
    grads: set[fx.Node]
    flops: dict[fx.Node, float]
    options: dict[fx.Node, list[Strategy]]
    last: dict[fx.Node, int]

    @staticmethod
    def of(
        piece: Piece, degree: int, grads: Collection[str], pinned: Mapping[str, Placement]
    ) -> Facts:
        """Work it out."""
        everything = list(piece.module.graph.nodes)
        nodes = tuple(node for node in everything if node.op == "call_function")
        outputs = tuple(everything[-1].args[0])
        names = dict(piece.states)
        twice = {n for n in names.values() if list(names.values()).count(n) > 1}
        states: dict[fx.Node, Placement | None] = {}
        for node in everything:
            if node.op == "placeholder" and node.name in names:
                free = REPLICATE if names[node.name] in twice else None
                states[node] = pinned.get(names[node.name], free)
        sizes = {n: _elements(n) for n in everything if n.op != "output"}
        flowing = {n for n in everything if n.op == "placeholder" and n.name in grads}
        for node in nodes:
            if _floats(node) and any(source in flowing for source in node.all_input_nodes):
                flowing.add(node)
        last = {source: i for i, node in enumerate(nodes) for source in tensor_args(node)}
        last |= dict.fromkeys(outputs, len(nodes))
        return Facts(
            degree,
            nodes,
            outputs,
            states,
            sizes,
            flowing,
            {node: _flops(node, flowing) for node in nodes},
            _options(nodes, states, degree),
            last,
        )


def _options(
    nodes: Sequence[fx.Node], states: Mapping[fx.Node, Placement | None], degree: int
) -> dict[fx.Node, list[Strategy]]:
    """Strategies of every node, from the shardings that its arguments can have."""
    blocks = {1} | {run_count(node) for node in nodes}
    reachable: dict[fx.Node, list[Shard]] = {}
    for state, fixed in states.items():
        if isinstance(fixed, Shard):
            reachable[state] = [fixed]
        elif fixed is None and any(op_name(user) in _REARRANGES for user in state.users):
            reachable[state] = [
                Shard(dim, count)
                for dim, size in enumerate(state.meta["val"].shape)
                for count in sorted(blocks)
                if divides(size, degree, count)
            ]
    options: dict[fx.Node, list[Strategy]] = {}
    for node in nodes:
        if not isinstance(node.meta.get("val"), Tensor | list | tuple):
            continue
        options[node] = strategies(node, degree, reachable, sorted(blocks))
        # In a fixed order: every rank has to find the same layout.
        shards = [s.output for s in options[node] if isinstance(s.output, Shard)]
        reachable[node] = list(dict.fromkeys(shards))
    return options


def _floats(node: fx.Node) -> list[Tensor]:
    value = node.meta.get("val")
    values = value if isinstance(value, list | tuple) else [value]
    return [v for v in values if isinstance(v, Tensor) and v.is_floating_point()]


def _elements(node: fx.Node) -> float:
    """Float elements for one sample."""
    return float(sum(math.prod(at_batch(size, 1) for size in v.shape) for v in _floats(node)))


def _flops(node: fx.Node, grads: Collection[fx.Node]) -> float:
    """Matmul FLOPs for one sample, forward and backward."""
    products, factors = matmul(node)
    return 2.0 * products * (1 + sum(factor in grads for factor in factors))


@dataclass
class _State:
    """A choice for the nodes so far, as far as later nodes can tell.

    Args:
        cost: Of all nodes so far.
        held: How the values and states that are still needed are held.
        forms: Other forms of them that exist.
        trail: The strategies and placements of states chosen, the last ones first.
        whole: Whether nothing has been sharded yet.
    """

    cost: float = 0.0
    held: dict[fx.Node, Placement] = field(default_factory=dict)
    forms: frozenset[tuple[fx.Node, Want]] = frozenset()
    trail: tuple[Any, ...] = ()
    whole: bool = True


@dataclass(frozen=True)
class Search:
    """One search.

    Args:
        facts: Of the piece.
        link: FLOPs that an element in a collective is worth.
    """

    facts: Facts
    link: float

    def run(self) -> Assignment:
        """The cheapest assignment."""
        beam = [_State()]
        for index, node in enumerate(self.facts.nodes):
            if node in self.facts.options:
                beam = self._step(beam, index, node)
        finished = [after for state in beam for after in self._finish(state)]
        return self._assignment(min(finished, key=lambda state: state.cost))

    def _step(self, beam: list[_State], index: int, node: fx.Node) -> list[_State]:
        best: dict[Any, _State] = {}
        for state in beam:
            for strategy in self.facts.options[node]:
                for after in self._apply(state, index, node, strategy):
                    key = (frozenset(after.held.items()), after.forms)
                    if key not in best or after.cost < best[key].cost:
                        best[key] = after
        ranked = sorted(best.values(), key=lambda state: state.cost)
        # Replicating everything is always possible: a way out where a later op needs whole values.
        return ranked[:BEAM] + [state for state in ranked[BEAM:] if state.whole]

    def _apply(
        self, state: _State, index: int, node: fx.Node, strategy: Strategy
    ) -> Iterator[_State]:
        """The states after a node has run by a strategy."""
        args = tensor_args(node)
        reads = list(zip(args, strategy.reads, strict=True))
        for placed in self._place(state, reads):
            after = self._read(state, placed, reads, written_args(node))
            if after is None:
                continue
            partial = isinstance(strategy.output, Partial)
            output: Placement = REPLICATE if partial else strategy.output
            after.cost += self._work(node, strategy)
            after.held[node] = output
            after.trail = ((node, strategy, placed), state.trail)
            after.whole = state.whole and not strategy.sharded
            self._forget(after, index, [node, *args])
            yield after

    def _place(
        self, state: _State, reads: Sequence[tuple[fx.Node, Want]]
    ) -> Iterator[dict[fx.Node, Placement]]:
        """Placements of the states that are read here for the first time."""
        choices: dict[fx.Node, tuple[Placement, ...]] = {}
        for arg, want in reads:
            if arg in self.facts.states and arg not in state.held:
                fixed = self.facts.states[arg]
                wanted = want if isinstance(want, Shard) else REPLICATE
                if fixed is not None:
                    choices[arg] = (fixed,)
                elif len(arg.users) > 1 and wanted != REPLICATE:
                    choices[arg] = (wanted, REPLICATE)
                else:
                    choices[arg] = (wanted,)
        for chosen in itertools.product(*choices.values()):
            yield dict(zip(choices, chosen, strict=True))

    def _read(
        self,
        state: _State,
        placed: Mapping[fx.Node, Placement],
        reads: Sequence[tuple[fx.Node, Want]],
        written: Collection[fx.Node],
    ) -> _State | None:
        """The state after the arguments have been converted, or None if that is not possible."""
        cost, held, forms = state.cost, {**state.held, **placed}, state.forms
        for arg, placement in placed.items():
            share = self.facts.degree if isinstance(placement, Shard) else 1
            cost += HELD_FLOPS * self.facts.sizes[arg] / share
        for arg, want in reads:
            steps = route(held.get(arg, REPLICATE), want)
            if steps and (arg in written or not isinstance(arg.meta["val"], Tensor)):
                return None
            for step in steps:
                if (arg, step) not in forms:
                    cost += self._convert(arg, step)
                    forms |= {(arg, step)}
        return _State(cost, held, forms)

    def _convert(self, value: fx.Node, step: Want) -> float:
        """`copy` and `split` send the gradient, `gather` sends the value.

        An all-gather has half the traffic of an all-reduce (and on gloo four times the time); they
        are weighed alike, and an all-gather reads and writes the parts once more to join them.
        """
        size = self.facts.sizes[value]
        if isinstance(step, Copied):
            return self._all_reduce(size) if value in self.facts.grads else 0.0
        sends = isinstance(step, Replicate) or value in self.facts.grads
        if isinstance(step, Replicate) and value in self.facts.states:
            size *= GATHERED_STATE
        return self._move(2.0 * size) + (self._all_reduce(size) if sends else 0.0)

    def _move(self, size: float) -> float:
        return MOVE_SHARE * self.link * size

    def _all_reduce(self, size: float) -> float:
        return self.link * size * 2.0 * (1.0 - 1.0 / self.facts.degree)

    def _work(self, node: fx.Node, strategy: Strategy) -> float:
        """What one device does for a node, and the sum of a partial result."""
        share = self.facts.degree if strategy.sharded else 1
        cost = self.facts.flops[node] / share
        if isinstance(strategy.output, Partial):
            cost += self._all_reduce(self.facts.sizes[node])
        if op_name(node) in _MOVES_NOTHING:
            return cost
        moved = self._local(node, strategy.output)
        for arg, want in zip(tensor_args(node), strategy.reads, strict=True):
            moved += 0.0 if arg in self.facts.states else self._local(arg, want)
        return cost + self._move(moved) * (2.0 if node in self.facts.grads else 1.0)

    def _local(self, value: fx.Node, placement: Want | Placement) -> float:
        share = self.facts.degree if isinstance(placement, Shard) else 1
        return self.facts.sizes[value] / share

    def _forget(self, state: _State, index: int, touched: Sequence[fx.Node]) -> None:
        """Drop what no later node reads."""
        gone = {value for value in touched if self.facts.last.get(value, -1) <= index}
        if gone:
            state.held = {v: p for v, p in state.held.items() if v not in gone}
            state.forms = frozenset(form for form in state.forms if form[0] not in gone)

    def _finish(self, state: _State) -> Iterator[_State]:
        """Outputs leave whole."""
        after = self._read(state, {}, [(out, REPLICATE) for out in self.facts.outputs], ())
        if after is not None:
            after.trail = state.trail
            yield after

    def _assignment(self, state: _State) -> Assignment:
        chosen: dict[str, Strategy] = {}
        states: dict[str, Placement] = {}
        trail = state.trail
        while trail:
            (node, strategy, placed), trail = trail
            chosen[node.name] = strategy
            states |= {arg.name: placement for arg, placement in placed.items()}
        return Assignment(self.facts.degree, chosen, states)
