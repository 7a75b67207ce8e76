"""Sums of linear maps of one tensor: a projection and the low-rank adapters that are added to it.

They are one linear map, so all that lies between the first of its matmuls and the sum stays
together and counts as one anchor.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from torch import fx

from rlplace.graph.groups.anchors import is_matmul, kind
from rlplace.graph.program import Program

_LINEAR = {"mul", "mul_", "div", "neg", "dropout", "view", "reshape", "_unsafe_view", "flatten"}
_LINEAR |= {"unflatten", "transpose", "permute", "to", "_to_copy", "contiguous", "clone", "alias"}
_LINEAR |= {"detach", "unsqueeze", "squeeze", "t"}
_SUMS = {"add", "add_"}


def find_adapters(program: Program, body: Sequence[fx.Node]) -> list[tuple[int, int]]:
    """(Index of the first matmul, index of the sum) of each sum of linear maps of one tensor."""
    order = {node: index for index, node in enumerate(body)}
    source: dict[fx.Node, fx.Node] = {}
    found = []
    active = _depending_on_inputs(program)
    for node in body:
        summands = [n for n in node.all_input_nodes if n in active]
        if kind(node) not in _SUMS or len(summands) != 2:
            continue
        chains = [list(_chain(summand, active, source)) for summand in summands]
        meeting = next((n for n in chains[0] if n in chains[1]), None)
        if meeting is None:
            continue
        parts = [chain[: chain.index(meeting)] for chain in chains]
        matmuls = [[n for n in part if n in order and is_matmul(n)] for part in parts]
        if all(matmuls):
            source[node] = meeting
            found.append((min(order[n] for part in matmuls for n in part), order[node]))
    return found


def _chain(
    node: fx.Node, active: Mapping[fx.Node, None], source: Mapping[fx.Node, fx.Node]
) -> Iterator[fx.Node]:
    """The tensors that a node is a linear function of, itself first."""
    yield node
    while True:
        inputs = [n for n in node.all_input_nodes if n in active]
        if node in source:
            node = source[node]
        elif len(inputs) == 1 and (kind(node) in _LINEAR or is_matmul(node)):
            node = inputs[0]
        else:
            return
        yield node


def _depending_on_inputs(program: Program) -> dict[fx.Node, None]:
    """All nodes but parameters, buffers and what is made of these alone."""
    active: dict[fx.Node, None] = {}
    for node in program.exported.graph.nodes:
        if node.name in program.inputs or any(n in active for n in node.all_input_nodes):
            active[node] = None
    return active
