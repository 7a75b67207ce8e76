"""The ops that hold a model's work, and where in its modules an op comes from."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from torch import fx

_MATMULS = {"linear", "addmm", "mm", "bmm", "matmul", "baddbmm", "addbmm", "einsum", "mv", "addmv"}
_MATMULS |= {"conv1d", "conv2d", "conv3d", "convolution", "conv_transpose1d", "conv_transpose3d"}
_MATMULS |= {"conv_transpose2d", "scaled_dot_product_attention", "_grouped_mm", "grouped_mm"}
_MATMULS |= {"grouped_mm_fallback", "bilinear", "chain_matmul"}
_RECURRENT = {"lstm", "gru", "rnn_tanh", "rnn_relu"}
_LOOKUPS = {"embedding", "embedding_bag", "_embedding_bag"}

#: What they bring together are branches, not factors.
JOINS = frozenset({"cat", "stack", "concat", "concatenate", "hstack", "vstack", "dstack"})
SUMS = frozenset({"add", "add_", "sub", "sub_"})


def kind(node: fx.Node) -> str:
    """``linear`` of ``aten.linear.default``, of any namespace."""
    target: Any = node.target
    packet = getattr(target, "overloadpacket", target)
    return getattr(packet, "__name__", str(packet))


def is_matmul(node: fx.Node) -> bool:
    """Whether an op holds matmul-like work."""
    return kind(node) in _MATMULS or is_recurrent(node)


def is_recurrent(node: fx.Node) -> bool:
    """Whether an op is a whole LSTM, GRU or RNN."""
    return kind(node) in _RECURRENT


def is_lookup(node: fx.Node) -> bool:
    """Whether an op looks rows of a table up."""
    return kind(node) in _LOOKUPS


def is_anchor(node: fx.Node) -> bool:
    """Whether an op may be what a group is about."""
    return is_matmul(node) or is_lookup(node)


def module_path(node: fx.Node) -> str:
    """Fully qualified name of the module whose forward made a node."""
    stack = node.meta.get("nn_module_stack") or {}
    path: str = list(stack.values())[-1][0] if stack else ""
    return re.sub(r"@\d+", "", path)


def elements(path: Sequence[str]) -> set[str]:
    """The repeated elements (``layers.3``) on a module path."""
    return {".".join(path[: i + 1]) for i, part in enumerate(path) if part.isdigit()}


def common(paths: Sequence[Sequence[str]]) -> list[str]:
    """What module paths have in common from the start."""
    shared: list[str] = []
    for parts in zip(*paths, strict=False):
        if len(set(parts)) > 1:
            break
        shared.append(parts[0])
    return shared
