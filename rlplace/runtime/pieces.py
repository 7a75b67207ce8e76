"""Pieces as the runtime runs them: what an export leaves to be mended."""

from __future__ import annotations

import torch
from torch import fx

from rlplace.graph.program import Piece


def protected(piece: Piece) -> Piece:
    """A piece that copies what it reads before it writes into it.

    Between groups a tensor may be a leaf of autograd, or be read again by a recompute.
    """
    graph = piece.module.graph
    outer = set(piece.reads) | set(piece.inputs)
    for name in sorted({found for node in graph.nodes for found in written_by(node)} & outer):
        source = next(node for node in graph.nodes if node.name == name)
        body = next(node for node in graph.nodes if node.op != "placeholder")
        with graph.inserting_before(body):
            copy = graph.call_function(torch.ops.aten.clone.default, (source,))
            copy.meta = dict(source.meta)
        source.replace_all_uses_with(copy, delete_user_cb=lambda user, own=copy: user is not own)
    piece.module.recompile()
    return piece


def without_integer_histograms(piece: Piece) -> Piece:
    """A piece whose histograms count floats, as a CPU wants it.

    The mixture of experts of transformers branches on the device, and a program has the branch of
    a GPU, which counts integers.
    """
    graph = piece.module.graph
    for node in graph.nodes:
        if node.target is torch.ops.aten.histc.default:
            (source,) = node.all_input_nodes
            with graph.inserting_before(node):
                floats = graph.call_function(torch.ops.aten.to.dtype, (source, torch.float32))
            floats.meta["val"] = source.meta["val"].to(torch.float32)
            node.replace_input_with(source, floats)
    piece.module.recompile()
    return piece


def written_by(node: fx.Node) -> list[str]:
    """Placeholders whose storage a node writes into."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return []
    schema = node.target._schema
    found = []
    for position, argument in enumerate(schema.arguments):
        info = argument.alias_info
        if info is not None and info.is_write and position < len(node.args):
            found.append(node.args[position])
    if node.target is torch.ops.aten.batch_norm.default:
        found += node.args[3:5]
    return [_base(value).name for value in found if isinstance(value, fx.Node)]


def _base(node: fx.Node) -> fx.Node:
    """The node whose storage a chain of views shows."""
    while isinstance(node.target, torch._ops.OpOverload) and node.target._schema.arguments:
        info = node.target._schema.arguments[0].alias_info
        if info is None or not isinstance(node.args[0], fx.Node):
            break
        node = node.args[0]
    return node
