"""What the rules and the lowering of layouts ask about a node of an exported graph."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

#: Where ops are known by name. The transformers library wraps grouped matmuls in ops of its own.
_NAMESPACES = ("aten", "transformers")

RESHAPES = frozenset(
    "view reshape _unsafe_view flatten unflatten unsqueeze squeeze view_as reshape_as".split()
)
#: What makes a tensor of nothing but sizes and a value.
FACTORIES = frozenset("zeros ones full empty new_zeros new_ones new_full new_empty".split())
#: What gives the elements of its argument another shape or dtype.
REARRANGES = RESHAPES | {"transpose", "t", "permute", "to", "clone", "expand"}
SPLITS = frozenset({"split", "chunk", "split_with_sizes"})
CONVOLUTIONS = frozenset(
    {"convolution", *(f"conv{way}{n}d" for way in ("", "_transpose") for n in (1, 2, 3))}
)


def op_name(node: fx.Node) -> str:
    """``linear`` of ``aten.linear.default``, ``getitem``, or an empty string."""
    if node.target is operator.getitem:
        return "getitem"
    target = node.target
    if isinstance(target, torch._ops.OpOverload) and target.namespace in _NAMESPACES:
        return str(target.overloadpacket.__name__)
    return ""


def is_tensor(node: fx.Node) -> bool:
    """Whether a node makes a tensor or a tuple of tensors."""
    value: Any = node.meta.get("val")
    value = value[0] if isinstance(value, list | tuple) and value else value
    return isinstance(value, Tensor)


def tensor_args(node: fx.Node) -> list[fx.Node]:
    """Arguments that are tensors (or tuples of tensors), with repeats, in order."""
    leaves = torch.utils._pytree.tree_leaves((node.args, node.kwargs))
    return [leaf for leaf in leaves if isinstance(leaf, fx.Node) and is_tensor(leaf)]


def shape(node: fx.Node) -> tuple[int, ...]:
    """Shape of a node's tensor; 0 stands for a size that depends on the batch."""
    value = node.meta["val"]
    value = value[0] if isinstance(value, list | tuple) else value
    return tuple(size if isinstance(size, int) else 0 for size in value.shape)


def written_args(node: fx.Node) -> list[fx.Node]:
    """Tensor arguments that must be what a node reads, not a copy of it.

    It writes into them, or makes a view of them while a later node writes into their memory.
    """
    if _is_alias(node):
        source = node.args[0]
        assert isinstance(source, fx.Node), "a view has a source"
        return [source] if any(writer > node for writer in _writers(source)) else []
    return _written(node)


def _written(node: fx.Node) -> list[fx.Node]:
    """Tensor arguments that a node writes into."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return []
    # Running statistics; the schema does not say so.
    if op_name(node) in ("batch_norm", "instance_norm"):
        return [arg for arg in node.args[3:5] if isinstance(arg, fx.Node)]
    formal = zip(target._schema.arguments, node.args, strict=False)
    return [
        arg
        for argument, arg in formal
        if argument.alias_info is not None
        and argument.alias_info.is_write
        and isinstance(arg, fx.Node)
    ]


def _is_alias(node: fx.Node) -> bool:
    """Whether a node makes a view of its first argument, or takes one of several views."""
    viewed = bool(node.args) and isinstance(node.args[0], fx.Node)
    return viewed and (op_name(node) == "getitem" or getattr(node.target, "is_view", False))


def _writers(node: fx.Node) -> set[fx.Node]:
    """The nodes that write into the memory of a node's value, through any view of it."""
    while _is_alias(node):
        node = node.all_input_nodes[0]
    found: set[fx.Node] = set()
    aliases = [node]
    while aliases:
        value = aliases.pop()
        for user in value.users:
            if _is_alias(user) and user.args[0] is value:
                aliases.append(user)
            elif value in _written(user) and user not in found:
                found.add(user)
                aliases.append(user)
    return found


def argument(node: fx.Node, position: int, name: str, default: Any = None) -> Any:
    """An argument that may be given by position or by name."""
    return node.args[position] if len(node.args) > position else node.kwargs.get(name, default)


def conv_groups(node: fx.Node) -> int:
    """`groups` of a convolution."""
    return int(argument(node, groups_position(node), "groups", 1))


def groups_position(node: fx.Node) -> int:
    """Which argument of a convolution, or of a group norm, is its number of groups."""
    return {"convolution": 8, "group_norm": 1}.get(op_name(node), 6)


def is_transposed(node: fx.Node) -> bool:
    """Whether a convolution is a transposed one: its weight is (in, out / groups, ...)."""
    return "transpose" in op_name(node) or (op_name(node) == "convolution" and bool(node.args[6]))


def run_count(node: fx.Node) -> int:
    """In how many runs a node cuts one dim of its argument, 1 where it does not."""
    if op_name(node) in SPLITS:
        return len(split_parts(node)[1])
    return 2 if op_name(node) == "glu" else 1


def split_parts(node: fx.Node) -> tuple[int, list[int]]:
    """The dim of a split or chunk, and the sizes of its parts."""
    values: Sequence[Tensor] = node.meta["val"]
    dim = argument(node, 2, "dim", 0) % values[0].ndim
    return dim, [size if isinstance(size := value.shape[dim], int) else 0 for value in values]
