"""A loss whose class scores exist for one chunk of the tokens at a time, forward and backward.

The last linear, and what leads from it to the cross entropy, run for one chunk after the other; the
backward pass makes the scores of a chunk again. The gradient of the scores meets the hidden states
and the weight chunk by chunk too, so nothing as large as all scores is ever made.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn import functional as F

from rlplace.errors import InputError
from rlplace.graph.program import Piece
from rlplace.graph.sharding.axis import (
    apply,
    current_axis,
    reduce,
    use_axis,
    vocab_cross_entropy,
)
from rlplace.graph.sharding.axis_rows import row_cross_entropy
from rlplace.graph.sharding.nodes import argument, op_name
from rlplace.runtime.axes import cut_cross_entropy, over_cp

_MEAN, _SUM = 1, 2
_VIEWS = ("view", "reshape", "_unsafe_view", "contiguous", "flatten")
#: Start, end and step of a slice that takes everything.
_ALL = (0, 2**63 - 1, 1)


def chunked(piece: Piece, chunks: int) -> Piece:
    """A piece whose losses go through their tokens in chunks.

    Args:
        piece: With the cross entropy, as one rank runs it.
        chunks: How many.

    Raises:
        InputError: If something else than a cast, a view or a slice of tokens is between a linear
            and the cross entropy; names it.
    """
    for loss in losses(piece):
        found = _Found.of(loss)
        with piece.module.graph.inserting_before(loss):
            rows = found.rows(piece.module.graph)
            args = (rows, *found.weights, found.target)
            options = asdict(found.kind(chunks))
            together = piece.module.graph.call_function(chunked_loss, args, options)
        together.meta = dict(loss.meta)
        loss.replace_all_uses_with(together)
        _erase(piece.module.graph, loss, found.linear)
    piece.module.recompile()
    return piece


def losses(piece: Piece) -> list[fx.Node]:
    """The cross entropies of a piece."""
    own = (vocab_cross_entropy, row_cross_entropy, cut_cross_entropy)
    nodes = piece.module.graph.nodes
    return [node for node in nodes if op_name(node) == "cross_entropy_loss" or node.target in own]


@dataclass(frozen=True)
class Kind:
    """What is the same in all chunks.

    Args:
        chunks: How many.
        dtype: Of the class scores in the loss, None for their own.
        mean: Whether the loss is a mean, or a sum.
        ignore: Target of tokens that do not count.
        smoothing: Label smoothing.
        vocab: Whether the classes are cut over the axis.
        cut: Whether the tokens are.
        beside: Whether that is on cp, and the axis is another.
    """

    chunks: int
    dtype: torch.dtype | None = None
    mean: bool = True
    ignore: int = -100
    smoothing: float = 0.0
    vocab: bool = False
    cut: bool = False
    beside: bool = False

    def total(self, scores: Tensor, target: Tensor) -> Tensor:
        """The sum of the losses of some tokens."""
        wide = scores if self.dtype is None else scores.to(self.dtype)
        if self.vocab:
            return vocab_cross_entropy(wide, target, None, _SUM, self.ignore)
        return F.cross_entropy(
            wide,
            target,
            reduction="sum",
            ignore_index=self.ignore,
            label_smoothing=self.smoothing,
        )


def chunked_loss(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, **options: Any
) -> Tensor:
    """Cross entropy of ``linear(hidden, weight, bias)``, chunk by chunk.

    Args:
        hidden: (tokens, width).
        weight: Of the linear, (classes, width).
        bias: Of the linear, (classes,).
        target: (tokens,).
        options: The fields of `Kind`.
    """
    kind = Kind(**options)
    total = apply(_Chunked, hidden, weight, bias, target, kind)
    count = (target != kind.ignore).sum()
    both = torch.stack((total, count.to(total.dtype)))
    if kind.cut:
        total, count = reduce(both).unbind()
    if kind.beside:
        total, count = over_cp(reduce)(both).unbind()
    return total / count if kind.mean else total


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, kind: Kind
    ) -> Tensor:
        ctx.kind, ctx.axis = kind, current_axis() if kind.vocab else None
        ctx.save_for_backward(hidden, weight, bias, target)
        parts = zip(hidden.chunk(kind.chunks), target.chunk(kind.chunks), strict=True)
        totals = [kind.total(F.linear(own, weight, bias), wanted) for own, wanted in parts]
        return torch.stack(totals).sum()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        hidden, weight, bias, target = ctx.saved_tensors
        of_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        of_weight = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        of_bias = torch.zeros_like(bias) if ctx.needs_input_grad[2] else None
        start = 0
        for own, wanted in zip(
            hidden.chunk(ctx.kind.chunks), target.chunk(ctx.kind.chunks), strict=True
        ):
            of_scores = _scores_gradient(ctx, F.linear(own, weight, bias), wanted, grads[0])
            if of_hidden is not None:
                torch.mm(of_scores, weight, out=of_hidden[start : start + len(own)])
            if of_weight is not None:
                of_weight.addmm_(of_scores.t(), own)
            if of_bias is not None:
                of_bias += of_scores.sum(0)
            del of_scores  # before those of the next chunk are made
            start += len(own)
        return of_hidden, of_weight, of_bias, None, None


def _scores_gradient(ctx: Any, scores: Tensor, target: Tensor, grad: Tensor) -> Tensor:
    scores.requires_grad_()
    with torch.enable_grad():
        if ctx.axis is None:
            total = ctx.kind.total(scores, target)
        else:
            with use_axis(ctx.axis):
                total = ctx.kind.total(scores, target)
    (found,) = torch.autograd.grad(total, scores, grad)
    return found


@dataclass(frozen=True)
class _Found:
    """A linear, a cross entropy, and what is between them.

    Args:
        loss, linear: The nodes.
        slices: (dim, start, end, step) of what is taken of the tokens, in order.
        dtype: Of the class scores in the loss, None for their own.
    """

    loss: fx.Node
    linear: fx.Node
    slices: tuple[tuple[int, int, int, int], ...] = field(default_factory=tuple)
    dtype: torch.dtype | None = None

    @staticmethod
    def of(loss: fx.Node) -> _Found:
        """Go back from a cross entropy.

        Raises:
            InputError: On an op that cannot be done chunk by chunk.
        """
        found = _Found(loss, loss)
        node = loss.args[0]
        while isinstance(node, fx.Node) and op_name(node) != "linear":
            found = found._before(node)
            node = node.args[0]
        if not isinstance(node, fx.Node) or argument(loss, 2, "weight") is not None:
            raise _refusal(loss)
        return replace(found, linear=node, slices=found.slices[::-1])

    def _before(self, node: fx.Node) -> _Found:
        name = op_name(node)
        if len(node.users) > 1 or node.op != "call_function":
            raise _refusal(node)
        if name == "to" and isinstance(node.args[1], torch.dtype):
            return replace(self, dtype=self.dtype or node.args[1])
        if name in _VIEWS and not self.slices:
            return self
        if name == "slice":
            own = _slice(node)
            dims = node.meta["val"].ndim if "val" in node.meta else 2
            if own[1:] == _ALL:
                return self
            if own[0] in range(dims - 1):  # of tokens, not of classes
                return replace(self, slices=(*self.slices, own))
        raise _refusal(node)

    @property
    def weights(self) -> tuple[Any, Any]:
        """Weight and bias of the linear."""
        return self.linear.args[1], argument(self.linear, 2, "bias")

    @property
    def target(self) -> Any:
        """What the classes should be."""
        return self.loss.args[1]

    def rows(self, graph: fx.Graph) -> fx.Node:
        """The hidden states of the tokens that count, one a row."""
        hidden: Any = self.linear.args[0]
        for own in self.slices:
            hidden = graph.call_function(torch.ops.aten.slice.Tensor, (hidden, *own))
        return graph.call_function(torch.flatten, (hidden, 0, -2))

    def kind(self, chunks: int) -> Kind:
        """The loss."""
        reduction = argument(self.loss, 3, "reduction", _MEAN)
        options = self.loss.kwargs if self.loss.target is cut_cross_entropy else {}
        if reduction not in (_MEAN, _SUM) or options.get("rows"):
            raise _refusal(self.loss)
        return Kind(
            chunks,
            self.dtype,
            reduction == _MEAN,
            argument(self.loss, 4, "ignore_index", -100),
            argument(self.loss, 5, "label_smoothing", 0.0),
            self.loss.target is vocab_cross_entropy or bool(options.get("classes")),
            self.loss.target is row_cross_entropy,
            self.loss.target is cut_cross_entropy,
        )


def _erase(graph: fx.Graph, last: fx.Node, first: fx.Node) -> None:
    """Take out a chain of nodes that nothing reads any more."""
    node: Any = last
    while not node.users:
        before = node.args[0]
        graph.erase_node(node)
        if node is first:
            break
        node = before


def _slice(node: fx.Node) -> tuple[int, int, int, int]:
    """Dim, start, end and step."""
    dim, start = argument(node, 1, "dim", 0), argument(node, 2, "start", None)
    end, step = argument(node, 3, "end", None), argument(node, 4, "step", 1)
    return dim, start or 0, _ALL[1] if end is None else end, step


def _refusal(node: fx.Node) -> InputError:
    rule = (
        "a loss in chunks is a linear, casts, views, slices of tokens and a cross entropy without "
        f"class weights; here is {node.name} ({op_name(node) or _name(node.target)})"
    )
    return InputError("plan.loss_chunks", node.name, rule, 1)


def _name(target: str | Callable[..., Any]) -> str:
    return target if isinstance(target, str) else target.__name__
