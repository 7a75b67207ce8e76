"""What the recompute mode ``ops`` keeps: results of matmuls and attention, which are not redone."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._python_dispatch import TorchDispatchMode

from rlplace.graph.program import Piece
from rlplace.graph.sharding.axis import COLLECTIVES
from rlplace.graph.sharding.nodes import CONVOLUTIONS, REARRANGES, op_name
from rlplace.runtime.attention import running
from rlplace.runtime.axes import on_its_axis
from rlplace.runtime.draws import draws

#: Names of the ops, beside attention.
_PRODUCTS = frozenset("mm addmm bmm baddbmm convolution _grouped_mm grouped_mm_fallback".split())
_ATTENTION = "_scaled_dot_product_"
#: The same in a program, and what is no more than a sum or a view.
_MATMULS = CONVOLUTIONS | set("linear matmul mm addmm bmm baddbmm".split())
_PASSIVE = REARRANGES | set("add sub slice select getitem contiguous alias".split())

_SPARED: ContextVar[bool] = ContextVar("rlplacespared", default=False)


def keeping(hold: Callable[[Tensor], object]) -> tuple[TorchDispatchMode, TorchDispatchMode]:
    """Contexts of a first run, and of a second one that takes what the first has kept.

    Args:
        hold: Called with every tensor that is kept.
    """
    kept: deque[_Result] = deque()
    return _First(kept, hold), _Second(kept)


def sparing(piece: Piece) -> Piece:
    """A piece that says while it runs a matmul whose result nothing redone needs.

    What only sums, views and collectives lead from to the results of the piece is not run again,
    for none of these keeps anything.
    """
    passive: set[fx.Node] = set()
    for node in reversed(piece.module.graph.nodes):
        if node.op == "output" or (_is_passive(node) and passive.issuperset(node.users)):
            passive.add(node)
        elif op_name(node) in _MATMULS and passive.issuperset(node.users):
            node.args = (node.target, *node.args)
            node.target = spared
    piece.module.recompile()
    return piece


def _is_passive(node: fx.Node) -> bool:
    name = op_name(node)
    idle = name == "dropout" and not draws(node)
    return on_its_axis(node.target) in COLLECTIVES or name in _PASSIVE or idle


def spared(target: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
    """A matmul whose result is not kept (`sparing`)."""
    token = _SPARED.set(True)
    try:
        return target(*args, **kwargs)
    finally:
        _SPARED.reset(token)


class _Result:
    """What an op gave.

    It is of no use if somebody has written into it since.
    """

    def __init__(self, made: Any, hold: Callable[[Tensor], object]) -> None:
        # The output itself becomes a node of autograd, which would keep all that it depends on.
        self._made = torch.utils._pytree.tree_map_only(Tensor, Tensor.detach, made)
        self._versions = [tensor._version for tensor in self._tensors()]
        self._held = [hold(tensor) for tensor in self._tensors()]

    @property
    def fresh(self) -> bool:
        """Whether it is what the op gave."""
        return [tensor._version for tensor in self._tensors()] == self._versions

    def take(self) -> Any:
        """The result; nobody holds it any more."""
        self._held.clear()
        return self._made

    def _tensors(self) -> list[Tensor]:
        leaves = torch.utils._pytree.tree_leaves(self._made)
        return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


class _First(TorchDispatchMode):
    def __init__(self, kept: deque[_Result], hold: Callable[[Tensor], object]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch: untyped
        self._kept, self._hold = kept, hold

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        if is_kept(func, args):
            self._kept.append(_Result(made, self._hold))
        return made


class _Second(TorchDispatchMode):
    def __init__(self, kept: deque[_Result]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch: untyped
        self._kept = kept

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if is_kept(func, args):
            result = self._kept.popleft()
            if result.fresh:
                return result.take()
        return func(*args, **(kwargs or {}))


def is_kept(op: Any, args: Sequence[Any]) -> bool:
    """Whether what an op gives is kept; called once for each op that runs."""
    name = op.overloadpacket.__name__ if isinstance(op, torch._ops.OpOverload) else ""
    if name.startswith(_ATTENTION):
        return not _dropout(op, args)
    if name not in _PRODUCTS or _SPARED.get():
        return False
    attention = running()
    if attention is None:
        return True
    attention.products += 1
    return attention.products > 1  # the first is the score matrix


def _dropout(op: torch._ops.OpOverload, args: Sequence[Any]) -> bool:
    """Whether a kernel draws: what is drawn after it must be drawn after it again."""
    names = [argument.name for argument in op._schema.arguments]
    place = names.index("dropout_p") if "dropout_p" in names else len(args)
    return place < len(args) and bool(args[place])
