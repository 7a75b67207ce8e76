"""The cheapest way to run a piece on an axis: one strategy for each of its nodes.

Each node runs by one of the strategies that `sharding.rules` allows. The search goes node
after node and keeps the cheapest choice for each way in which the values that are still needed may
be held: a dynamic program, exact but for the width of its beam. The cost is a nominal one, in
FLOPs: local matmul FLOPs forward and backward, elements moved, parameters held and elements in
collectives, forward and backward.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, fx

from rlplace.graph.sharding.borders import Held
from rlplace.graph.sharding.expert_rules import Internal
from rlplace.graph.sharding.facts import Facts
from rlplace.graph.sharding.lower import Assignment, route
from rlplace.graph.sharding.nodes import (
    REARRANGES,
    SPLITS,
    op_name,
    tensor_args,
    written_args,
)
from rlplace.graph.sharding.owned_rules import sent_values
from rlplace.graph.sharding.rules import (
    REPLICATE,
    Copied,
    Strategy,
    Want,
)
from rlplace.graph.types import Partial, Placement, Replicate, Shard

#: An element that is read or written costs this share of one in a collective.
MOVE_SHARE = 1.0 / 15.0
#: FLOPs that a parameter held is worth.
HELD_FLOPS = 20.0
#: How much dearer it is to gather a state, in every micro-batch, than an activation: a last resort.
GATHERED_STATE = 100.0
#: Dims of a state whose gradient is not summed over the tp axis in every micro-batch, but at the
#: price of a last resort: a matrix is to be cut, a vector (the weight of a norm) may be copied.
MATRIX = 2
#: Partial choices that are kept after each node.
BEAM = 64

_MOVES_NOTHING = REARRANGES | SPLITS | {"getitem", "slice", "select", "unbind", "detach", "alias"}


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
    held: dict[fx.Node, Placement | Copied] = field(default_factory=dict)
    forms: frozenset[tuple[fx.Node, Want]] = frozenset()
    trail: tuple[Any, ...] = ()
    whole: bool = True


def _forget(state: _State, gone: Collection[fx.Node]) -> None:
    """Drop what no later node reads."""
    if gone:
        state.held = {v: p for v, p in state.held.items() if v not in gone}
        state.forms = frozenset(form for form in state.forms if form[0] not in gone)


@dataclass(frozen=True)
class Search:
    """One search.

    Args:
        facts: Of the piece.
        link: FLOPs that an element in a collective is worth.
    """

    facts: Facts
    link: float

    def run(self) -> Assignment | None:
        """The cheapest assignment; None if rows in the device's own order end where none fits."""
        beam = [_State(held=self._given())]
        for index, node in enumerate(self.facts.nodes):
            if node in self.facts.options:
                beam = self._step(beam, index, node)
        finished = [after for state in beam for after in self._finish(state)]
        best = min(finished, key=lambda state: state.cost, default=None)
        return self._assignment(best) if best else None

    def _given(self) -> dict[fx.Node, Placement | Copied]:
        return {node: held for node, held in self.facts.given.items() if isinstance(held, Shard)}

    def _step(self, beam: list[_State], index: int, node: fx.Node) -> list[_State]:
        best: dict[Any, _State] = {}
        args, written = tensor_args(node), written_args(node)
        ways = [
            (strategy, list(zip(args, strategy.reads, strict=True)), self._work(node, strategy))
            for strategy in self.facts.options[node]
        ]
        gone = {value for value in [node, *args] if self.facts.last.get(value, -1) <= index}
        for state in beam:
            for strategy, reads, work in ways:
                for placed in self._place(state, reads):
                    after = self._read(state, placed, reads, written)
                    if after is None:
                        continue
                    self._apply(after, state, node, strategy, placed)
                    after.cost += work
                    _forget(after, gone)
                    key = (frozenset(after.held.items()), after.forms, after.whole)
                    if key not in best or after.cost < best[key].cost:
                        best[key] = after
        ranked = sorted(best.values(), key=lambda state: state.cost)
        # Replicating everything is always possible: a way out where a later op needs whole values.
        return ranked[:BEAM] + [state for state in ranked[BEAM:] if state.whole]

    def _apply(
        self,
        after: _State,
        before: _State,
        node: fx.Node,
        strategy: Strategy,
        placed: dict[fx.Node, Placement],
    ) -> None:
        """Note that a node has run by a strategy."""
        after.held[node] = strategy.held
        after.trail = ((node, strategy, placed), before.trail)
        after.whole = before.whole and not strategy.sharded

    def _place(
        self, state: _State, reads: Sequence[tuple[fx.Node, Want]]
    ) -> Iterator[dict[fx.Node, Placement]]:
        """Placements of the states, and of what is given as we like, read here the first time."""
        choices: dict[fx.Node, tuple[Placement, ...]] = {}
        for arg, want in reads:
            if arg.op == "placeholder" and arg not in state.held:
                fixed = self.facts.placed(arg)
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
            if arg in self.facts.states:
                share = self.facts.degree if isinstance(placement, Shard) else 1
                cost += HELD_FLOPS * self.facts.sizes[arg] / share
            if arg.name in self.facts.summands:
                held[arg] = Copied()
        for arg, want in reads:
            base = held.get(arg, REPLICATE)
            steps = route(base, want)
            fixed = arg in written or any(isinstance(each, Internal) for each in (base, want))
            if steps and (fixed or not isinstance(arg.meta["val"], Tensor)):
                return None
            for step in steps:
                if (arg, step) not in forms:
                    cost += self._convert(arg, base, step)
                    forms |= {(arg, step)}
                base = step
        return _State(cost, held, forms)

    def _convert(self, value: fx.Node, base: Placement | Copied, step: Want) -> float:
        """`copy` and `split` send the gradient, `gather` sends the value, the others both.

        An all-gather has half the traffic of an all-reduce (and on gloo four times the time).
        `gather` and `split` are weighed like an all-reduce: they share no work. An all-gather
        reads and writes the parts once more to join them.
        """
        size, flows = self.facts.sizes[value], value in self.facts.grads
        if isinstance(base, Copied):
            return 0.0
        if self.facts.routes and isinstance(base, Shard):
            size = max(size, 1.0)  # whatever the dtype, rows stay where they are
        if value in self.facts.states and self._is_dear(value, step):
            size *= GATHERED_STATE
        if base == REPLICATE and isinstance(step, Copied):
            return self._all_reduce(size) if flows else 0.0
        both = (1.0 + flows) / 2.0
        if isinstance(base, Shard) and isinstance(step, Shard):
            return (self._move(2.0 * size) + self._all_reduce(size) * both) / self.facts.degree
        if isinstance(step, Copied):
            return self._move(2.0 * size) + self._all_reduce(size) * both
        sends = isinstance(step, Replicate) or flows
        return self._move(2.0 * size) + (self._all_reduce(size) if sends else 0.0)

    def _is_dear(self, state: fx.Node, step: Want) -> bool:
        matrix = state.meta["val"].ndim >= MATRIX and not self.facts.routes
        whole = isinstance(step, Copied) and matrix
        return isinstance(step, Replicate) or whole

    def _move(self, size: float) -> float:
        return MOVE_SHARE * self.link * size

    def _all_reduce(self, size: float) -> float:
        return self.link * size * 2.0 * (1.0 - 1.0 / self.facts.degree)

    def _work(self, node: fx.Node, strategy: Strategy) -> float:
        """What one device does for a node, and the sum of a partial result."""
        share = self.facts.degree if strategy.sharded else 1
        cost = self.facts.flops[node] / share
        if isinstance(strategy.output, Partial):
            cost += self._all_reduce(self.facts.sizes[node]) * self._ways(node, strategy)
        for value in sent_values(node, strategy):
            both = (1.0 + (value in self.facts.grads)) / 2.0
            cost += self._all_reduce(self.facts.sizes[value]) * both / self.facts.degree
        if op_name(node) in _MOVES_NOTHING:
            return cost
        moved = self._local(node, strategy.held)
        for arg, want in zip(tensor_args(node), strategy.reads, strict=True):
            moved += 0.0 if arg in self.facts.states else self._local(arg, want)
        return cost + self._move(moved) * (2.0 if node in self.facts.grads else 1.0)

    def _ways(self, node: fx.Node, strategy: Strategy) -> float:
        """A scattered sum is half an all-reduce, and so is the gathering of its gradient."""
        if strategy.scattered is None:
            return 1.0
        return (1.0 + (node in self.facts.grads)) / 2.0

    def _local(self, value: fx.Node, placement: Want | Placement) -> float:
        share = self.facts.degree if isinstance(placement, Shard) else 1
        return self.facts.sizes[value] / share

    def _finish(self, state: _State) -> Iterator[_State]:
        """Outputs leave as they are wanted."""
        if any(isinstance(state.held.get(out), Internal) for out in self.facts.outputs):
            return
        wants = zip(self.facts.outputs, self.facts.left, strict=True)
        after = self._read(state, {}, [(out, want) for out, want in wants if want is not None], ())
        if after is not None:
            after.trail = state.trail
            yield after

    def _assignment(self, state: _State) -> Assignment:
        chosen: dict[str, Strategy] = {}
        placements: dict[fx.Node, Placement] = {}
        trail = state.trail
        while trail:
            (node, strategy, placed), trail = trail
            chosen[node.name] = strategy
            placements |= placed
        facts = self.facts
        states = {n.name: p for n, p in placements.items() if n in facts.states}
        reads = {n.name: p for n, p in {**facts.given, **placements}.items() if p is not None}
        reads = {name: p for name, p in reads.items() if name not in states and p != REPLICATE}
        left = [self._left(state, *each) for each in zip(facts.outputs, facts.left, strict=True)]
        writes = tuple(left) if any(isinstance(p, Shard) for p in left) else ()
        return Assignment(facts.degree, chosen, states, reads, writes, facts.summands)

    def _left(self, state: _State, output: fx.Node, want: Held) -> Replicate | Shard:
        held = state.held.get(output, REPLICATE) if want is None else want
        return held if isinstance(held, Shard) else REPLICATE
