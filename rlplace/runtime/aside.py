"""Gradients of parameters put aside, for schedules that make them later than those of inputs.

The backward of a matmul-like op makes the gradient of its input and that of its parameter, by two
kernels that do not need each other (zero-bubble schedules, Qi et al., arXiv 2401.10241). In a piece
that went through `apart`, such ops put the second one aside under the micro-batch that is in
backward. The formulas are autograd's own (derivatives.yaml), so that the sums have the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload

from rlplace.graph.program import Piece
from rlplace.runtime.keeping import spared
from rlplace.runtime.weight_slices import WeightSlice

aten = torch.ops.aten
Gradients = tuple[Tensor | None, ...]


@dataclass
class Aside:
    """Gradients of one micro-batch on one stage that are still to be made.

    Args:
        hold: Called with every tensor that is kept for them.
        anchor: What the result of an op depends on in place of its parameter. Autograd calls the
            hooks of a parameter in every backward that it has a part in, with no gradient too.
    """

    hold: Callable[[Tensor], object]
    anchor: Tensor = field(default_factory=lambda: torch.zeros(0, requires_grad=True))
    _entries: list[tuple[tuple[Tensor, ...], Callable[[], Gradients], list[object]]] = field(
        default_factory=list
    )

    def put(
        self, targets: tuple[Tensor, ...], make: Callable[[], Gradients], kept: Sequence[Tensor]
    ) -> None:
        """Keep a function that makes the gradients of some tensors, and what it needs."""
        self._entries.append((targets, make, [self.hold(tensor) for tensor in kept]))

    def make(self) -> None:
        """Make all gradients and add them to those of the parameters."""
        targets: list[Tensor] = []
        gradients: list[Tensor] = []
        for tensors, make, kept in self._entries:
            for tensor, gradient in zip(tensors, make(), strict=True):
                if gradient is not None and tensor.requires_grad:
                    targets.append(tensor)
                    gradients.append(gradient)
            kept.clear()
        self._entries.clear()
        if targets:
            torch.autograd.backward(targets, gradients)


class _Switch:
    """Where gradients go now. Recompute on a GPU runs in a thread of autograd, so this is plain."""

    aside: Aside | None = None


@contextmanager
def putting(aside: Aside | None) -> Iterator[None]:
    """Let ops that run inside put the gradients of their parameters aside.

    Both the forward and the backward of a micro-batch run under it; with None, nothing changes.
    """
    before, _Switch.aside = _Switch.aside, aside
    try:
        yield
    finally:
        _Switch.aside = before


@dataclass(frozen=True)
class _Rule:
    """How an op is split.

    Args:
        order: Positions of the input, the parameter and the bias among its arguments.
        fits: Whether its other arguments are such as the formulas are for.
        inputs: From (gradient, input, parameter, arguments) to the gradient of the input.
        params: From the same, but the parameter on the meta device, to those of the parameter and
            of the bias.
    """

    order: tuple[int, int, int]
    fits: Callable[[Sequence[Any]], bool]
    inputs: Callable[[Tensor, Tensor, Tensor, Sequence[Any]], Tensor]
    params: Callable[[Tensor, Tensor, Tensor, Sequence[Any]], Gradients]


def run_apart(op: OpOverload, *args: Any, **kwargs: Any) -> Any:
    """An op whose parameter gradients are put aside where the switch says so."""
    aside, rule = _Switch.aside, _RULES[op]
    if aside is None or kwargs or not torch.is_grad_enabled() or not rule.fits(args):
        return op(*args, **kwargs)
    source = args[rule.order[0]]
    return _Apart.apply(aside.anchor, source, aside, op, args)  # type: ignore[no-untyped-call]  # torch has no types


class _Apart(torch.autograd.Function):
    """Backward gives the gradient of the input and puts the others aside."""

    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, first: Tensor, aside: Aside, op: OpOverload, args: Sequence[Any]
    ) -> Any:
        rule = _RULES[op]
        found = (args[at] for at in rule.order[1:] if 0 <= at < len(args))
        ctx.targets = tuple(tensor for tensor in found if tensor is not None)
        ctx.save_for_backward(first, ctx.targets[0])
        ctx.aside, ctx.rule = aside, rule
        # Without its tensors, which autograd keeps.
        ctx.args = tuple(None if isinstance(arg, Tensor) else arg for arg in args)
        return op(*args)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        first, weight = ctx.saved_tensors
        args, targets = ctx.args, ctx.targets
        rule: _Rule = ctx.rule

        # By then the weights may have been given back (ZeRO-3); their shape is enough.
        shape = torch.empty_strided(
            weight.shape, weight.stride(), dtype=weight.dtype, device="meta"
        )

        def make() -> Gradients:
            return rule.params(grad, first, shape, args)[: len(targets)]

        ctx.aside.put(targets, make, (first, grad))
        needed = ctx.needs_input_grad[1]
        source = rule.inputs(grad, first, weight, args) if needed else None
        return None, source, None, None, None


def _run_spared(op: OpOverload, *args: Any) -> Any:
    """`run_apart` of a matmul whose result is not kept for recompute."""
    return spared(run_apart, op, *args)


def apart(piece: Piece, trained: Collection[str]) -> Piece:
    """A piece whose matmul-like ops with a parameter can put its gradient aside.

    Args:
        piece: What one rank runs, lowered or not.
        trained: Fully qualified names of the trained parameters.
    """
    params = {place for place, key in piece.states if WeightSlice.of(key).name in trained}
    for node in piece.module.graph.nodes:
        runs = _run_spared if node.target is spared else run_apart
        op, args = (
            (node.args[0], node.args[1:]) if runs is _run_spared else (node.target, node.args)
        )
        rule = _RULES.get(op) if node.op == "call_function" else None
        if rule is None or node.kwargs:
            continue
        weight, bias = (_at(args, place) for place in rule.order[1:])
        if _parameter(weight, params) and (bias is None or _parameter(bias, params)):
            node.target, node.args = runs, (op, *args)
    piece.module.recompile()
    return piece


def parameters_apart(piece: Piece) -> set[str]:
    """Fully qualified names of the parameters whose gradients a piece can put aside."""
    names, found = dict(piece.states), set()
    for node in piece.module.graph.nodes:
        if node.target in (run_apart, _run_spared):
            op, *args = node.args
            values = [_at(args, place) for place in _RULES[op].order[1:]]
            found |= {names[_root(value).name] for value in values if isinstance(value, fx.Node)}
    return found


def _at(args: Sequence[Any], position: int) -> Any:
    return args[position] if 0 <= position < len(args) else None


def _parameter(value: Any, params: Collection[str]) -> bool:
    """Whether a value is a parameter or a view of one."""
    return isinstance(value, fx.Node) and _root(value).name in params


def _root(node: fx.Node) -> fx.Node:
    while getattr(node.target, "is_view", False) and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node


def _rows(tensor: Tensor) -> Tensor:
    """All dims but the last as one, as matmuls of many dims are run."""
    return tensor.reshape(-1, tensor.shape[-1])


def _times_right(grad: Tensor, first: Tensor, right: Tensor) -> Tensor:
    """Gradient of the left factor of ``mm(first, right)``."""
    flat, rows = _rows(grad), _rows(first)
    if rows.stride(0) == 1 and rows.stride(1) == rows.shape[0]:
        return right.mm(flat.t()).t().view_as(first)
    return flat.mm(right.t()).view_as(first)


def _left_times(grad: Tensor, first: Tensor, right: Tensor) -> Tensor:
    """Gradient of the right factor of ``mm(first, right)``."""
    flat, rows = _rows(grad), _rows(first)
    if right.stride(0) == 1 and right.stride(1) == right.shape[0]:
        return flat.t().mm(rows).t()
    return rows.t().mm(flat)


def _linear_input(grad: Tensor, first: Tensor, weight: Tensor, args: Sequence[Any]) -> Tensor:
    return _times_right(grad, first, weight.t())


def _linear_params(grad: Tensor, first: Tensor, weight: Tensor, args: Sequence[Any]) -> Gradients:
    return _left_times(grad, first, weight.t()).t(), _rows(grad).sum(0)


def _mm_input(grad: Tensor, first: Tensor, weight: Tensor, args: Sequence[Any]) -> Tensor:
    return _times_right(grad, first, weight)


def _mm_params(grad: Tensor, first: Tensor, weight: Tensor, args: Sequence[Any]) -> Gradients:
    return _left_times(grad, first, weight), _rows(grad).sum(0)


def _bmm_input(grad: Tensor, first: Tensor, weight: Tensor, args: Sequence[Any]) -> Tensor:
    return grad.bmm(weight.transpose(1, 2))


def _bmm_params(grad: Tensor, first: Tensor, weight: Tensor, args: Sequence[Any]) -> Gradients:
    return (first.transpose(1, 2).bmm(grad),)


def _conv(
    grad: Tensor, first: Tensor, weight: Tensor, args: Sequence[Any], mask: list[bool]
) -> Gradients:
    dims = weight.dim() - 2
    groups = args[6] if len(args) > 6 else 1
    stride, padding, dilation = (
        _each(args[at] if at < len(args) else default, dims)
        for at, default in ((3, 1), (4, 0), (5, 1))
    )
    found: Gradients = aten.convolution_backward(
        grad,
        first,
        weight,
        [weight.shape[0]],
        stride,
        padding,
        dilation,
        False,
        [0] * dims,
        groups,
        mask,
    )
    return found


def _each(value: Any, dims: int) -> list[int]:
    values = [value] if isinstance(value, int) else list(value)
    return values * dims if len(values) == 1 else values


def _conv_input(grad: Tensor, first: Tensor, weight: Tensor, args: Sequence[Any]) -> Tensor:
    found = _conv(grad, first, weight, args, [True, False, False])[0]
    assert found is not None
    return found


def _conv_params(grad: Tensor, first: Tensor, weight: Tensor, args: Sequence[Any]) -> Gradients:
    like = torch.empty_like(weight, device=grad.device)  # the op asks for a tensor, not for values
    return _conv(grad, first, like, args, [False, True, True])[1:]


def _no_input(grad: Tensor, first: Tensor, weight: Tensor, args: Sequence[Any]) -> Tensor:
    raise AssertionError("an index has no gradient")


def _table(grad: Tensor, first: Tensor, weight: Tensor, args: Sequence[Any]) -> Gradients:
    padding = args[2] if len(args) > 2 else -1
    scale = args[3] if len(args) > 3 else False
    return (aten.embedding_dense_backward(grad, first, weight.shape[0], padding, scale),)


def _always(args: Sequence[Any]) -> bool:
    return True


def _folds(args: Sequence[Any]) -> bool:
    """Whether a linear or a matmul is one matrix product of rows."""
    first, weight = args[:2]
    return bool(first.dim() >= 2 and weight.dim() == 2)


def _unscaled(args: Sequence[Any]) -> bool:
    return len(args) == 3 and args[0].dim() == 1


def _dense_table(args: Sequence[Any]) -> bool:
    return not (len(args) > 4 and args[4])


_CONV = _Rule((0, 1, 2), _always, _conv_input, _conv_params)
_RULES: dict[Any, _Rule] = {
    aten.linear.default: _Rule((0, 1, 2), _folds, _linear_input, _linear_params),
    aten.matmul.default: _Rule((0, 1, -1), _folds, _mm_input, _mm_params),
    aten.mm.default: _Rule((0, 1, -1), _always, _mm_input, _mm_params),
    aten.addmm.default: _Rule((1, 2, 0), _unscaled, _mm_input, _mm_params),
    aten.bmm.default: _Rule((0, 1, -1), _always, _bmm_input, _bmm_params),
    aten.conv1d.default: _CONV,
    aten.conv2d.default: _CONV,
    aten.conv3d.default: _CONV,
    aten.embedding.default: _Rule((1, 0, -1), _dense_table, _no_input, _table),
}
