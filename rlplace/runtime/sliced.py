"""A piece cut into several, so that the weights of its matmuls are whole one slice at a time.

What is lent is lent between the steps of a stage (`rlplace.runtime.lending`). So the ops before a
matmul, the product with each slice of its weight, and the ops behind it become steps of their own
(operator splitting, Jiang et al., OSDP, arXiv 2209.13258). Slices are of rows: those of a
``linear`` give columns of its result, those of other matmuls, whose weights are transposed, give
summands of it.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from rlplace.graph.program import Piece
from rlplace.graph.sharding import axis
from rlplace.graph.types import Group, Layout
from rlplace.graph.weights import Matmul, matmul_of
from rlplace.plan.types import GroupChoice
from rlplace.runtime.axes import on_its_axis
from rlplace.runtime.weight_slices import WeightSlice

aten = torch.ops.aten

#: What a lowered piece makes of a state as a whole, and can make of its rows alike.
_BY_ROWS = (axis.copy, axis.once)


def rows_of_slices(group: Group, choice: GroupChoice, layout: Layout) -> dict[str, int]:
    """Rows of a slice of each weight of a group that is cut, by fully qualified name."""
    return {
        group.params[one.param]: one.rows // choice.slices
        for one in layout.work.weights
        if choice.cuts(one)
    }


def sliced(piece: Piece, rows: Mapping[str, int], count: int, group: int) -> list[Piece]:
    """The pieces that do the same one after the other.

    Args:
        piece: As one rank runs it; its graph is used up.
        rows: Of a slice of each weight that is cut, by fully qualified name.
        count: Slices of a weight.
        group: Number of the group; what the pieces hand on to each other is named by it.
    """
    if not rows:
        return [piece]
    slicing = _Slicing(piece, rows, count)
    steps = [step for step in slicing.steps() if step]
    return _Cutting(piece, slicing.states, steps, group).pieces()


class _Slicing:
    """The steps of a piece, with its products with cut weights written out slice by slice.

    Args:
        piece: The piece; nodes are added to its graph, in which their order means nothing.
        rows, count: As for `sliced`.
    """

    def __init__(self, piece: Piece, rows: Mapping[str, int], count: int) -> None:
        self._graph, self._rows, self._count = piece.module.graph, rows, count
        places = (node for node in self._graph.nodes if node.op == "placeholder")
        #: Under which name the stage has the state that a placeholder stands for.
        self.states = {node: key for node, (_, key) in zip(places, piece.states, strict=False)}
        self._steps: list[list[fx.Node]] = [[]]
        self._place: dict[fx.Node, list[fx.Node]] = {}

    def steps(self) -> list[list[fx.Node]]:
        """Nodes of each step, in order; a step may be empty."""
        for node in list(self._graph.nodes):
            if node.op != "call_function":
                continue
            product = matmul_of(node)
            if product is None or not self._is_cut(product):
                self._put(node)
                continue
            write_out = self._columns if product.linear else self._summands
            node.replace_all_uses_with(write_out(node, product))
            self._graph.erase_node(node)
        return self._steps

    def _put(self, node: fx.Node) -> None:
        """Into the last step; a part of a tuple into that of the tuple, for tensors are fenced."""
        source = node.args[0] if node.target is operator.getitem else None
        step = self._place.get(source, self._steps[-1])  # type: ignore[arg-type]  # any key
        step.append(node)
        self._place[node] = step

    def _emit(self, target: Any, *args: Any) -> fx.Node:
        node = self._graph.call_function(target, args)
        self._put(node)
        return node

    def _is_cut(self, product: Matmul) -> bool:
        bias = product.added if product.linear else None
        cut = self._state(product.weight) in self._rows
        return cut and (bias is None or self._state(bias) is not None)

    def _state(self, value: Any) -> str | None:
        """Name of the state that a value is, which is read here alone."""
        if not isinstance(value, fx.Node) or len(value.users) != 1:
            return None
        return (
            self._state(value.args[0])
            if on_its_axis(value.target) in _BY_ROWS
            else self.states.get(value)
        )

    def _slice(self, value: fx.Node, index: int) -> fx.Node:
        """A slice of a state in the last step, read as the whole state was."""
        if on_its_axis(value.target) in _BY_ROWS:
            if value in self._place:
                self._place.pop(value).remove(value)
            return self._emit(value.target, self._slice(value.args[0], index))  # type: ignore[arg-type]  # a node
        place = self._graph.placeholder(value.name)
        self.states[place] = WeightSlice(self.states[value], index, self._count).key
        return place

    def _columns(self, node: fx.Node, product: Matmul) -> fx.Node:
        """The result of a linear, joined behind the last slice."""
        made = []
        for index in range(self._count):
            self._steps.append([])
            states = [product.weight] if product.added is None else [product.weight, product.added]
            own = [self._slice(state, index) for state in states]
            made.append(self._emit(node.target, product.rows, *own))
        self._steps.append([])
        return self._emit(aten.cat.default, made, -1)

    def _summands(self, node: fx.Node, product: Matmul) -> fx.Node:
        """The result of another matmul; what is added to it is added to the first summand."""
        size = self._rows[str(self._state(product.weight))]
        columns = self._emit(aten.split.Tensor, product.rows, size, -1)
        parts = [self._emit(operator.getitem, columns, index) for index in range(self._count)]
        plain = node.target if product.added is None else aten.mm.default
        total: fx.Node | None = None
        for index, part in enumerate(parts):
            self._steps.append([])
            own = self._slice(product.weight, index)
            if total is not None:
                total = self._emit(aten.add.Tensor, total, self._emit(plain, part, own))
            elif product.added is not None:
                total = self._emit(node.target, product.added, part, own)
            else:
                total = self._emit(plain, part, own)
        self._steps.append([])
        assert total is not None, "a weight has at least one slice"
        return total


class _Cutting:
    """A piece of several steps as a piece for each.

    Args:
        piece: The piece.
        states: Names of its states by placeholder.
        steps: Its nodes.
        group: Number of its group.
    """

    def __init__(
        self,
        piece: Piece,
        states: Mapping[fx.Node, str],
        steps: Sequence[Sequence[fx.Node]],
        group: int,
    ) -> None:
        self._states, self._steps, self._group = states, steps, group
        nodes = list(piece.module.graph.nodes)
        outer = [node for node in nodes if node.op == "placeholder"][len(piece.states) :]
        names = (*piece.inputs, *piece.reads)
        #: Inputs and reads are known by the name that they have outside of the group.
        self._names = dict(zip(outer, names, strict=False))
        self._inputs = frozenset(piece.inputs)
        self._owner = {node: at for at, step in enumerate(steps) for node in step}
        last = len(steps) - 1
        self._gives: list[dict[str, fx.Node]] = [{} for _ in steps]
        for at, step in enumerate(steps):
            for source in (source for node in step for source in node.all_input_nodes):
                if (maker := self._owner.get(source, at)) != at:
                    self._gives[maker][self._name(source)] = source
        (output,) = next(node for node in nodes if node.op == "output").args
        for name, node in zip(piece.writes, output, strict=True):
            self._gives[self._owner.get(node, last)][name] = node

    def pieces(self) -> list[Piece]:
        """The pieces, in order."""
        pairs = zip(self._steps, self._gives, strict=True)
        return [self._piece(step, gives) for step, gives in pairs]

    def _name(self, node: fx.Node) -> str:
        return self._names.get(node) or f"{self._group}/{node.name}"

    def _piece(self, step: Sequence[fx.Node], gives: Mapping[str, fx.Node]) -> Piece:
        inside = set(step)
        read = (source for node in step for source in node.all_input_nodes)
        outer = dict.fromkeys(one for one in (*read, *gives.values()) if one not in inside)
        states = [one for one in outer if one in self._states]
        others = [one for one in outer if one not in self._states]
        inputs = [one for one in others if self._name(one) in self._inputs]
        reads = [one for one in others if one not in inputs]
        graph = fx.Graph()
        copies = {one: graph.placeholder(one.name) for one in (*states, *inputs, *reads)}
        for node in step:
            copies[node] = graph.node_copy(node, copies.__getitem__)
        graph.output(tuple(copies[node] for node in gives.values()))
        return Piece(
            fx.GraphModule(torch.nn.Module(), graph),
            tuple((copies[one].name, self._states[one]) for one in states),
            tuple(map(self._name, inputs)),
            tuple(map(self._name, reads)),
            tuple(gives),
        )
