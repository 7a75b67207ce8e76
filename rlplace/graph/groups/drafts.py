"""Groups before they are described: their nodes, what they read and what others read of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import fx

from rlplace.graph.groups.anchors import module_path
from rlplace.graph.program import Program


@dataclass(frozen=True)
class Draft:
    """A group before it is described.

    Args:
        nodes: Its nodes, in order.
        reads: What they read of others: states, inputs, nodes of other groups and of the prologue.
        writes: Those of its nodes that others, or the caller of the program, read.
        params: Fully qualified names of the states among `reads`.
    """

    nodes: tuple[fx.Node, ...]
    reads: tuple[fx.Node, ...]
    writes: tuple[fx.Node, ...]
    params: tuple[str, ...]

    @property
    def ops(self) -> tuple[str, ...]:
        """Names of its nodes."""
        return tuple(node.name for node in self.nodes)

    @property
    def modules(self) -> tuple[str, ...]:
        """Fully qualified names of the modules that they come from."""
        return tuple(dict.fromkeys(module_path(node) for node in self.nodes))


def drafts_of(program: Program, groups: Sequence[tuple[str, ...]]) -> list[Draft]:
    """The groups named by `coarsen`, in the same order."""
    by_name = {node.name: node for node in program.nodes}
    drafts = []
    for names in groups:
        nodes = tuple(by_name[name] for name in names)
        inside = set(nodes)
        outer = dict.fromkeys(s for n in nodes for s in n.all_input_nodes if s not in inside)
        states = (program.states[n.name] for n in outer if n.name in program.states)
        writes = tuple(n for n in nodes if any(_reads(u) and u not in inside for u in n.users))
        drafts.append(Draft(nodes, tuple(outer), writes, tuple(dict.fromkeys(states))))
    return drafts


def _reads(user: fx.Node) -> bool:
    return "_assert" not in getattr(user.target, "__name__", "")
