"""From a module to an `OpGraph`: export, coarsen, find what repeats, count each part once."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx.experimental import _config as fx_config

from rlplace.errors import CaptureError
from rlplace.graph.coarsen import check_granularity, coarsen
from rlplace.graph.groups.anchors import module_path
from rlplace.graph.groups.drafts import Draft, drafts_of
from rlplace.graph.groups.naming import group_names
from rlplace.graph.program import Program, export_program
from rlplace.graph.shapes import elements, is_straight
from rlplace.graph.structures import Structures
from rlplace.graph.tracing.batch import BatchDim
from rlplace.graph.tracing.twins import Loss, Targets
from rlplace.graph.types import TP_DEGREES, Edge, Group, OpGraph


def capture(
    module: nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    name: str = "",
    loss: Loss | None = None,
    targets: Targets | None = None,
    batch_dim: BatchDim = None,
    tokens_per_sample: int | None = None,
    granularity: str | int = "fine",
    degrees: Sequence[int] = TP_DEGREES,
    source: Mapping[str, str | int | float | bool | None] | None = None,
) -> OpGraph:
    """Capture a module as an op graph.

    What forward returns decides what a training step is. A scalar float (the output itself, its
    item or field ``loss``, or its first tensor) is the loss, the mean over the batch; what comes
    beside it is no output of the graph. Without one, every tensor is an output, and each float one
    is counted with a gradient that comes back for it.

    Counts are lines over the batch. Where a tensor is not (the scores of every sample against every
    other, as in a contrastive loss), they are exact at a batch of 2 and 3, the line through these
    is an underestimate beyond, and a warning says so. What a boolean mask picks is counted as
    everything, with a warning. Elements are counted whatever their dtype. Regions of activation
    checkpointing are not kept, for the plan decides anew what is recomputed; those of autocast are
    traced in the module's own dtype; nothing flows back through those of `torch.no_grad`.

    Args:
        module: Any module that `torch.export` takes; on any device, with storage or without.
        args: Positional example inputs, of a batch of at least 2; meta tensors will do. They may
            be nested, and what is no tensor is a constant.
        kwargs: Keyword example inputs.
        loss: A loss outside of the module: ``loss(output, *targets)`` gives the mean over the
            batch, and its ops belong to the graph. A function, or a module (`nn.MSELoss()`).
        targets: What `loss` takes beside the output: a tensor, a tuple, or a dict of keywords.
        batch_dim: The batch dim of all inputs, or of each by argument name (None: no batch); by
            default dim 0 of the first tensor and of all that have its size there.
        name: Name of the model; by default the class of the module.
        tokens_per_sample: By default the length of the first (batch, length) integer input, or 1.
        granularity: ``fine`` (at most 200 groups), ``coarse`` (at most 100), or how many groups
            (`rlplace.graph.coarsen.coarsen`).
        degrees: Degrees of the tp axis to find layouts for.
        source: How to build the model again (`OpGraph.source`).

    Raises:
        CaptureError: If `torch.export` refuses the module; says where in the user's code.
        InputError: If `granularity` is none of these, or the inputs do not fit the module.
    """
    check_granularity(granularity)
    program = export_program(module, args, kwargs, loss=loss, targets=targets, batch_dim=batch_dim)
    if not program.body():
        raise CaptureError(f"no op of {type(module).__name__} depends on its parameters")
    _warn_of_curves(program)
    drafts = drafts_of(program, coarsen(program, granularity))
    uses = Counter(param for draft in drafts for param in draft.params)
    structures = Structures(program, degrees, frozenset(n for n in uses if uses[n] > 1))
    with fx_config.patch(meta_nonzero_assume_all_nonzero=True):  # type: ignore[attr-defined]  # made late
        indices = [structures.index(draft) for draft in drafts]
    names = group_names(drafts)
    groups = tuple(
        Group(
            i,
            names[i],
            indices[i],
            draft.ops,
            draft.modules,
            draft.params,
            tuple(node.name for node in draft.writes),
        )
        for i, draft in enumerate(drafts)
    )
    sizes = _trainable_sizes(program)
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


def _trainable_sizes(program: Program) -> dict[str, int]:
    """Elements of each trainable parameter."""
    values = {node.name: node.meta.get("val") for node in program.exported.graph.nodes}
    names = {name: values[place] for place, name in program.states.items()}
    return {name: value.numel() for name, value in names.items() if name in program.trainable}


def _warn_of_curves(program: Program) -> None:
    for node in program.nodes:
        value = node.meta.get("val")
        if isinstance(value, Tensor) and not is_straight(value):
            warnings.warn(
                f"tensor {node.name} of {module_path(node) or 'the model'} does not grow in "
                "proportion to the batch: counts are exact at batches of 2 and 3 and a line "
                "beyond, which is too low where a size is the batch squared",
                stacklevel=3,
            )
            return


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
