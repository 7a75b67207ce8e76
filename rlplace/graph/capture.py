"""From a module to an `OpGraph`: export, coarsen, find what repeats, count each part once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rlplace.errors import InputError
from rlplace.graph.coarsen import MAX_GROUPS, coarsen
from rlplace.graph.drafts import Draft, drafts_of
from rlplace.graph.naming import group_names
from rlplace.graph.program import export_program
from rlplace.graph.shapes import elements
from rlplace.graph.structures import Structures
from rlplace.graph.types import Edge, Group, OpGraph


def capture(
    module: nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    name: str = "",
    tokens_per_sample: int | None = None,
    granularity: str = "fine",
    degrees: Sequence[int] = (2, 4, 8),
    source: Mapping[str, str | int | float | bool | None] | None = None,
) -> OpGraph:
    """Capture a module as an op graph.

    Args:
        module: Returns a scalar loss (mean over the batch); its tensors have the batch in dim 0.
        args: Positional example inputs, of a batch of at least 2; meta tensors will do.
        kwargs: Keyword example inputs.
        name: Name of the model; by default the class of the module.
        tokens_per_sample: By default the length of the first (batch, length) integer input, or 1.
        granularity: ``fine`` (at most 200 groups) or ``coarse`` (at most 100).
        degrees: Degrees of the tp axis to find layouts for.
        source: How to build the model again (`OpGraph.source`).

    Raises:
        CaptureError: If `torch.export` refuses the module; says where in the user's code.
        InputError: If `granularity` is unknown.
    """
    if granularity not in MAX_GROUPS:
        rule = f"must be one of {', '.join(MAX_GROUPS)}"
        raise InputError("granularity", granularity, rule, "fine")
    program = export_program(module, args, kwargs)
    drafts = drafts_of(program, coarsen(program, granularity))
    uses = Counter(param for draft in drafts for param in draft.params)
    structures = Structures(program, degrees, frozenset(n for n in uses if uses[n] > 1))
    indices = [structures.index(draft) for draft in drafts]
    names = group_names(drafts)
    groups = tuple(
        Group(i, names[i], indices[i], draft.ops, draft.modules, draft.params)
        for i, draft in enumerate(drafts)
    )
    sizes = {n: p.numel() for n, p in module.named_parameters() if p.requires_grad}
    tied = tuple((n, sizes[n]) for n in uses if n in sizes and uses[n] > 1)
    if tokens_per_sample is None:
        tokens_per_sample = _sequence_length((args, dict(kwargs or {})))
    return OpGraph(
        name=name or type(module).__name__,
        groups=groups,
        edges=_edges(drafts),
        structures=tuple(structures.found),
        tokens_per_sample=tokens_per_sample,
        tied=tied,
        source=dict(source or {}),
    )


def _edges(drafts: Sequence[Draft]) -> tuple[Edge, ...]:
    makers = {node: index for index, draft in enumerate(drafts) for node in draft.nodes}
    edges = []
    for index, draft in enumerate(drafts):
        for node in draft.reads:
            if node in makers:
                value = node.meta["val"]
                assert isinstance(value, Tensor), f"{node.name} crosses a group and is no tensor"
                size = elements(value)
                if value.is_floating_point():
                    edges.append(Edge(makers[node], index, node.name, floats=size))
                else:
                    other = size * value.element_size()
                    edges.append(Edge(makers[node], index, node.name, other_bytes=other))
    return tuple(edges)


def _sequence_length(call: Any) -> int:
    for leaf in torch.utils._pytree.tree_leaves(call):
        if isinstance(leaf, Tensor) and leaf.ndim == 2 and not leaf.is_floating_point():
            return leaf.shape[1]
    return 1
