"""Names of an ONNX graph's groups, from the paths of the modules that its nodes come from."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rlplace.graph.formats.onnx_costs import is_anchor

if TYPE_CHECKING:
    from onnx import NodeProto

_SCOPES = "pkg.torch.onnx.name_scopes"


def module_of(node: NodeProto, stored: frozenset[str]) -> str:
    """Module path of a node: from the exporter's notes, its own name, or its parameters."""
    notes = {entry.key: entry.value for entry in node.metadata_props}
    if _SCOPES in notes:
        scopes: list[str] = ast.literal_eval(notes[_SCOPES])
        return scopes[-2] if len(scopes) > 1 else ""
    if node.name.startswith("/"):
        return ".".join(node.name.strip("/").split("/")[:-1])
    params = (name for name in node.input if name in stored)
    return next(params, "").rpartition(".")[0]


def group_names(groups: Sequence[Sequence[NodeProto]], stored: frozenset[str]) -> list[str]:
    """What the working ops of each group have in common of their module paths, made unique.

    Args:
        groups: The nodes of each group.
        stored: Names of the initializers that are parameters or states.
    """
    seen: Counter[str] = Counter()
    names = []
    for nodes in groups:
        anchors = [n for n in nodes if is_anchor(n.op_type, n.input, stored)]
        paths = [module_of(node, stored).split(".") for node in anchors or nodes]
        shared = [a[0] for a in zip(*paths, strict=False) if len(set(a)) == 1]
        name = ".".join(_prefix(paths, len(shared))) or (anchors or nodes)[0].op_type
        seen[name] += 1
        names.append(name if seen[name] == 1 else f"{name}#{seen[name]}")
    return names


def _prefix(paths: Sequence[Sequence[str]], most: int) -> list[str]:
    """The parts with which all paths begin."""
    for length in range(most, 0, -1):
        if len({tuple(path[:length]) for path in paths}) == 1:
            return [part for part in paths[0][:length] if part]
    return []
