"""An axis of a mesh as a lowered piece sees it: collectives that autograd differentiates.

Megatron's conjugate pairs (Shoeybi et al., 2019, figure 3) and the two ops that need more than a
collective (embedding and cross entropy over a sharded vocabulary). They are the targets of nodes of
a lowered graph; they find their axis in a context variable in the forward pass and keep it for the
backward pass, so that the same graph runs on a process group, in a simulation, and on the meta
device.

A value is replicated when every device of the axis holds it whole; then its gradient is replicated
too. `copy` and `gather_copy` mark the exception: a whole value that each device reads for its own
share of the work, whose gradient is the sum over the devices. Their counterparts on sums are
`reduce` and `reduce_scatter`. States whose gradients are left as summands (on cp) are read as they
are for a share of the work, and by `once` and `part` otherwise.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from rlplace.graph.sharding.shards import by_device, by_run, cut, padded, runs_of

CollectiveKind = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all"]


class Axis(Protocol):
    """One axis of a mesh, as one of its devices sees it. Nothing is changed in place."""

    @property
    def rank(self) -> int:
        """Coordinate of this device on the axis."""
        ...

    @property
    def size(self) -> int:
        """Number of devices on the axis."""
        ...

    def all_reduce(self, tensor: Tensor, op: Literal["sum", "max"] = "sum") -> Tensor:
        """Sum or maximum over the devices, on every device."""
        ...

    def all_gather(self, tensor: Tensor, dim: int) -> Tensor:
        """The tensors of all devices, joined along a dim, on every device."""
        ...

    def reduce_scatter(self, tensor: Tensor, dim: int) -> Tensor:
        """The sum over the devices, of which each gets its equal chunk along a dim."""
        ...

    def all_to_all(self, tensor: Tensor, dim: int, joined: int) -> Tensor:
        """Chunk i along `dim` goes to device i; what comes is joined along `joined`."""
        ...

    def all_to_all_rows(self, tensor: Tensor, sent: Sequence[int], got: Sequence[int]) -> Tensor:
        """`sent[i]` rows (dim 0, in order) go to device i, `got[i]` come from it, likewise."""
        ...


@dataclass
class MetaAxis:
    """An axis without devices: gives results their shape, and writes down what was asked.

    Args:
        size: Number of devices on the axis.
        rank: Coordinate on it.
        calls: (kind, elements of the whole tensor) of each collective so far.
    """

    size: int
    rank: int = 0
    calls: list[tuple[CollectiveKind, int]] = field(default_factory=list)

    def all_reduce(self, tensor: Tensor, op: Literal["sum", "max"] = "sum") -> Tensor:
        """A tensor of the same shape."""
        self.calls.append(("all_reduce", tensor.numel()))
        return tensor.new_empty(tensor.shape)

    def all_gather(self, tensor: Tensor, dim: int) -> Tensor:
        """A tensor that is `size` times as long in `dim`."""
        self.calls.append(("all_gather", tensor.numel() * self.size))
        shape = list(tensor.shape)
        shape[dim] *= self.size
        return tensor.new_empty(shape)

    def reduce_scatter(self, tensor: Tensor, dim: int) -> Tensor:
        """A tensor that has one part of `size` in `dim`."""
        self.calls.append(("reduce_scatter", tensor.numel()))
        shape = list(tensor.shape)
        shape[dim] //= self.size
        return tensor.new_empty(shape)

    def all_to_all(self, tensor: Tensor, dim: int, joined: int) -> Tensor:
        """A tensor that is shorter in `dim` and longer in `joined`."""
        self.calls.append(("all_to_all", tensor.numel() * self.size))
        shape = list(tensor.shape)
        shape[dim] //= self.size
        shape[joined] *= self.size
        return tensor.new_empty(shape)

    def all_to_all_rows(self, tensor: Tensor, sent: Sequence[int], got: Sequence[int]) -> Tensor:
        """A tensor of as many rows as come; each device is taken to send as many as this one."""
        self.calls.append(("all_to_all", tensor.numel() * self.size))
        return tensor.new_empty((sum(got), *tensor.shape[1:]))


_AXIS: ContextVar[Axis] = ContextVar("rlplace_axis")


@contextmanager
def use_axis(axis: Axis) -> Iterator[None]:
    """Run lowered pieces on an axis. The backward pass needs no context."""
    token = _AXIS.set(axis)
    try:
        yield
    finally:
        _AXIS.reset(token)


def current_axis() -> Axis:
    """The axis that lowered pieces run on."""
    return _AXIS.get()


def copy(tensor: Tensor) -> Tensor:
    """Identity; the gradient is summed over the devices."""
    return apply(_Copy, tensor, _AXIS.get())


def reduce(tensor: Tensor) -> Tensor:
    """Sum over the devices; the gradient passes as it is."""
    return apply(_Reduce, tensor, _AXIS.get())


def split(tensor: Tensor, dim: int, blocks: int = 1, run: int = 0) -> Tensor:
    """The device's own part; the gradient is gathered."""
    return apply(_Split, tensor, _AXIS.get(), dim, blocks, run)


def gather(tensor: Tensor, dim: int, blocks: int = 1, run: int = 0) -> Tensor:
    """The whole tensor; the gradient, which is that of the whole, is cut."""
    return apply(_Gather, tensor, _AXIS.get(), dim, blocks, run, False)


def gather_copy(tensor: Tensor, dim: int, blocks: int = 1, run: int = 0) -> Tensor:
    """The whole tensor, read for the device's share of work; the gradient is reduce-scattered."""
    return apply(_Gather, tensor, _AXIS.get(), dim, blocks, run, True)


def reduce_scatter(tensor: Tensor, dim: int, blocks: int = 1, run: int = 0) -> Tensor:
    """The device's own part of the sum over the devices; the gradient is gathered."""
    return apply(_ReduceScatter, tensor, _AXIS.get(), dim, blocks, run)


def exchange(tensor: Tensor, held: tuple[int, int, int], wanted: tuple[int, int, int]) -> Tensor:
    """From a shard of one dim to a shard of another, each given as (dim, blocks, run)."""
    return apply(_Exchange, tensor, _AXIS.get(), held, wanted)


def once(tensor: Tensor) -> Tensor:
    """A state whose gradient is a summand, read for work that all devices do alike."""
    return apply(_Once, tensor, _AXIS.get())


def part(tensor: Tensor, dim: int, blocks: int = 1, run: int = 0) -> Tensor:
    """The device's own part of a state whose gradient is a summand: zero for the other parts."""
    return apply(_Part, tensor, _AXIS.get(), dim, blocks, run)


def apply(function: type[torch.autograd.Function], *args: Any) -> Tensor:
    """Apply a function with a gradient of its own; torch leaves its `apply` untyped."""
    out: Tensor = function.apply(*args)  # type: ignore[no-untyped-call]  # torch: untyped
    return out


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return ctx.axis.all_reduce(grads[0]), None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, axis: Axis) -> Tensor:
        return axis.all_reduce(tensor)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0], None


def _whole(ctx: Any, grad: Tensor) -> Tensor:
    """The gradients of all devices, joined."""
    gathered = ctx.axis.all_gather(grad, ctx.dim)
    return by_run(gathered, ctx.dim, ctx.blocks, ctx.axis.size)


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, axis: Axis, dim: int, blocks: int, run: int) -> Tensor:
        ctx.axis, ctx.dim, ctx.blocks = axis, dim, runs_of(tensor.shape[dim], blocks, run)
        return cut(tensor, dim, ctx.blocks, axis.rank, axis.size)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return _whole(ctx, grads[0]), None, None, None, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tensor: Tensor, axis: Axis, dim: int, blocks: int, run: int, summed: bool
    ) -> Tensor:
        ctx.axis, ctx.dim, ctx.summed = axis, dim, summed
        ctx.blocks = runs_of(tensor.shape[dim] * axis.size, blocks, run)
        return by_run(axis.all_gather(tensor, dim), dim, ctx.blocks, axis.size)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        axis, dim, blocks = ctx.axis, ctx.dim, ctx.blocks
        if ctx.summed:
            mine = axis.reduce_scatter(by_device(grads[0], dim, blocks, axis.size), dim)
        else:
            mine = cut(grads[0], dim, blocks, axis.rank, axis.size)
        return mine, None, None, None, None, None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, axis: Axis, dim: int, blocks: int, run: int) -> Tensor:
        ctx.axis, ctx.dim, ctx.blocks = axis, dim, runs_of(tensor.shape[dim], blocks, run)
        return axis.reduce_scatter(by_device(tensor, dim, ctx.blocks, axis.size), dim)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return _whole(ctx, grads[0]), None, None, None, None


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tensor: Tensor, axis: Axis, held: tuple[int, ...], wanted: tuple[int, ...]
    ) -> Tensor:
        ctx.axis, ctx.held, ctx.wanted = axis, held, wanted
        return _exchanged(tensor, axis, held, wanted)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return _exchanged(grads[0], ctx.axis, ctx.wanted, ctx.held), None, None, None


def _exchanged(
    tensor: Tensor, axis: Axis, held: tuple[int, ...], wanted: tuple[int, ...]
) -> Tensor:
    (joined, *inner), (dim, *outer) = held, wanted
    chunks = by_device(tensor, dim, runs_of(tensor.shape[dim], *outer), axis.size)
    got = axis.all_to_all(chunks, dim, joined)
    return by_run(got, joined, runs_of(got.shape[joined], *inner), axis.size)


class _Once(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, axis: Axis) -> Tensor:
        ctx.size = axis.size
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0] / ctx.size, None


class _Part(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, axis: Axis, dim: int, blocks: int, run: int) -> Tensor:
        ctx.axis, ctx.dim, ctx.blocks = axis, dim, runs_of(tensor.shape[dim], blocks, run)
        return cut(tensor, dim, ctx.blocks, axis.rank, axis.size)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        whole = padded(grads[0], ctx.dim, ctx.blocks, ctx.axis.rank, ctx.axis.size)
        return whole, None, None, None, None


def vocab_embedding(weight: Tensor, indices: Tensor, padding_idx: int = -1) -> Tensor:
    """This device's summand of an embedding whose rows are sharded: zero for foreign rows."""
    axis = _AXIS.get()
    rows = weight.shape[0]
    local = indices - axis.rank * rows
    own = (local >= 0) & (local < rows)
    padding = padding_idx - axis.rank * rows
    looked_up = F.embedding(
        local.clamp(0, rows - 1), weight, padding if 0 <= padding < rows else None
    )
    return looked_up * own.unsqueeze(-1)


def vocab_cross_entropy(
    logits: Tensor,
    target: Tensor,
    weight: None = None,
    reduction: int = 1,
    ignore_index: int = -100,
) -> Tensor:
    """Cross entropy of logits (rows, classes) whose classes are sharded; exact gradients.

    Two small all-reduces instead of a gather of the logits (Shoeybi et al., 2019, section 3).
    `reduction` counts as in ATen: 0 none, 1 mean, 2 sum.
    """
    valid = target != ignore_index
    losses = apply(_VocabCrossEntropy, logits, target, valid, _AXIS.get())
    if reduction == 0:
        return losses
    return losses.sum() / valid.sum() if reduction == 1 else losses.sum()


class _VocabCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, valid: Tensor, axis: Axis) -> Tensor:
        classes = logits.shape[1]
        local = target - axis.rank * classes
        own = (local >= 0) & (local < classes) & valid
        local = local.clamp(0, classes - 1).unsqueeze(1)
        wide = logits.float() if logits.element_size() < 4 else logits
        shifted = wide - axis.all_reduce(wide.amax(1), "max").unsqueeze(1)
        mine = shifted.gather(1, local).squeeze(1) * own
        exponentials = shifted.exp()
        total, picked = axis.all_reduce(torch.stack((exponentials.sum(1), mine))).unbind()
        ctx.save_for_backward(exponentials / total.unsqueeze(1), local, own, valid)
        ctx.dtype = logits.dtype
        return ((total.log() - picked) * valid).to(logits.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        probabilities, local, own, valid = ctx.saved_tensors
        hot = torch.zeros_like(probabilities).scatter_(
            1, local, own.unsqueeze(1).to(probabilities.dtype)
        )
        grad = (probabilities - hot) * (grads[0] * valid).unsqueeze(1)
        return grad.to(ctx.dtype), None, None, None


def rank_seed(tensor: Tensor) -> tuple[Tensor, Tensor | None] | None:
    """Let the next op draw other random numbers on every device of the axis.

    The seed is drawn from the default generator of the CPU, which has to be in step on all
    devices of the axis (as replicated random ops need anyhow), and the device's coordinate is
    added to it. So a sharded dropout draws independent masks, and draws them again under
    recompute.

    Returns:
        What `restore_seed` needs to go on as if nothing had been drawn but one seed; None on the
        meta device, which draws nothing.
    """
    if tensor.is_meta:
        return None
    seed = int(torch.randint(2**62, ()))
    on_gpu = tensor.is_cuda
    states = torch.get_rng_state(), torch.cuda.get_rng_state(tensor.device) if on_gpu else None
    torch.manual_seed(seed + _AXIS.get().rank)
    return states


def restore_seed(states: tuple[Tensor, Tensor | None] | None, tensor: Tensor) -> None:
    """Undo `rank_seed`; `tensor` is the one that it was given."""
    if states is None:
        return
    torch.set_rng_state(states[0])
    if states[1] is not None:
        torch.cuda.set_rng_state(states[1], tensor.device)


#: What takes no time on a device but the time of its collectives.
COLLECTIVES = (
    copy,
    reduce,
    split,
    gather,
    gather_copy,
    reduce_scatter,
    exchange,
    once,
    part,
    rank_seed,
    restore_seed,
)
