"""Higher-order ops of an exported program: those that are regions are inlined, others refused.

- `torch.no_grad` becomes a `detach` of all that a gradient would flow back to, then plain ops.
- Checkpoint regions and autocast regions become plain ops (see `rlplace.graph.tracing.modes`).
- `torch.cond`, `while_loop`, `scan`, `map` and `flex_attention` hold graphs of their own whose
  work depends on values, so there is nothing to count or to place: a `CaptureError`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import HigherOrderOperator

from rlplace.errors import CaptureError

_WAYS_OUT = {
    "cond": "compute both sides and choose with torch.where",
    "while_loop": "write the loop in Python with a fixed number of turns; it is unrolled",
    "scan": "write the loop in Python; it is unrolled",
    "associative_scan": "write the loop in Python, or use torch.cumsum and its like",
    "map_impl": "use torch.vmap, or write the loop in Python",
    "flex_attention": "use torch.nn.functional.scaled_dot_product_attention with a mask",
}

#: Region -> position of its graph among the arguments.
_REGIONS = {"wrap_with_set_grad_enabled": 1, "wrap_with_autocast": 4}
_REGIONS |= dict.fromkeys(("tag_activation_checkpoint", "wrap_activation_checkpoint", "wrap"), 0)


def inline_regions(root: fx.GraphModule, trainable: Collection[str]) -> None:
    """Replace every region of a graph by its ops, in place.

    Args:
        root: The graph.
        trainable: Names of the placeholders that require a gradient.

    Raises:
        CaptureError: If a higher-order op is left.
    """
    graph = root.graph
    needs: set[fx.Node] = set()
    for node in list(graph.nodes):
        if node.op == "placeholder" and node.name in trainable:
            needs.add(node)
        if isinstance(node.target, HigherOrderOperator) and node.op == "call_function":
            _inline(root, node, needs)
        elif not stops_gradient(node) and any(source in needs for source in node.all_input_nodes):
            needs.add(node)
    for node in reversed(graph.nodes):
        if node.op == "get_attr" and not node.users:
            graph.erase_node(node)
    root.recompile()


def stops_gradient(node: fx.Node) -> bool:
    """Whether no gradient flows back through an op."""
    return node.target in (torch.ops.aten.detach.default, torch.ops.aten.detach_.default)


def _inline(root: fx.GraphModule, call: fx.Node, needs: set[fx.Node]) -> None:
    """Put the ops of a region before its call, and its results in place of those of the call."""
    cut: dict[fx.Node, fx.Node] = {}

    def detached(node: fx.Node) -> fx.Node:
        if node not in needs or not isinstance(node.meta.get("val"), Tensor):
            return node
        if node not in cut:
            cut[node] = root.graph.call_function(torch.ops.aten.detach.default, (node,))
            cut[node].meta = {k: v for k, v in call.meta.items() if k != "val"}
            cut[node].meta["val"] = node.meta["val"]
        return cut[node]

    def keep(node: fx.Node) -> fx.Node:
        return node

    with root.graph.inserting_before(call):
        results = _emit(root, root, call, {}, keep, detached, needs)
    for user in list(call.users):
        user.replace_all_uses_with(results[user.args[1]])
        root.graph.erase_node(user)
    root.graph.erase_node(call)


def _emit(
    root: fx.GraphModule,
    owner: fx.GraphModule,
    call: fx.Node,
    values: Mapping[fx.Node, fx.Node],
    passed: Callable[[fx.Node], fx.Node],
    detached: Callable[[fx.Node], fx.Node],
    needs: set[fx.Node],
) -> Any:
    """Copy the ops of the region `call` of the graph of `owner` into the graph of `root`."""
    name = getattr(call.target, "__name__", str(call.target))
    if name not in _REGIONS:
        raise CaptureError(refusal(call, name))
    position = _REGIONS[name]
    inner = owner.get_submodule(str(_node(call.args[position]).target))
    assert isinstance(inner, fx.GraphModule)
    if name == "wrap_with_set_grad_enabled":
        passed = passed if call.args[0] else detached
    given = [_value(values, arg) for arg in call.args[position + 1 :]]
    copies: dict[fx.Node, Any] = {}
    for node in inner.graph.nodes:
        if node.op == "placeholder":
            value = given.pop(0)
            copies[node] = passed(value) if isinstance(value, fx.Node) else value
        elif node.op == "output":
            return fx.node.map_arg(node.args[0], lambda n: copies[n])
        elif isinstance(node.target, HigherOrderOperator):
            copies[node] = _emit(root, inner, node, copies, passed, detached, needs)
        elif node.op == "call_function" and isinstance(copies.get(node.args[0]), list | tuple):
            copies[node] = copies[node.args[0]][node.args[1]]
        elif node.op != "get_attr":
            copies[node] = root.graph.node_copy(node, lambda n: copies[n])
            if any(source in needs for source in copies[node].all_input_nodes):
                needs.add(copies[node])
    raise AssertionError("a graph without output")


def _node(argument: Any) -> fx.Node:
    assert isinstance(argument, fx.Node), f"{argument} is no node"
    return argument


def _value(values: Mapping[fx.Node, fx.Node], argument: Any) -> Any:
    return values.get(argument, argument) if isinstance(argument, fx.Node) else argument


def refusal(node: fx.Node, name: str) -> str:
    """The message for a higher-order op that is no region."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    owner = stack[-1][0] if stack and stack[-1][0] else "the model"
    way = _WAYS_OUT.get(name, "use plain torch ops in its place")
    return (
        f"{name} in the forward of {owner} runs graphs of its own, whose work depends on "
        f"values; it cannot be counted or placed. Way out: {way}"
    )
