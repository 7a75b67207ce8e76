"""What a piece of a program costs: FLOPs, traffic, and what autograd keeps for the backward pass.

A piece is run forward and backward on the meta device, where tensors have shapes and storages but
no memory, at two batch sizes; every count becomes the line through the two. So nothing here
models autograd: what is saved, which gradients are computed and which ops that takes is what
PyTorch itself does. Two ops are replaced by what a GPU kernel does: attention by a flash kernel
(it saves q, k, v, the output and one log-sum-exp a row, never the scores) and dropout by the fused
kernel (it saves a mask of one byte an element).

Rules of the counts, op by op as they reach the kernels:

- FLOPs: a multiply and an add are two; only matmuls, convolutions and attention count. Formulas
  are those of `torch.utils.flop_counter`, and own ones for attention, grouped matmuls and the
  backward of grouped convolutions.
- Traffic: an op reads each of its floating-point inputs once (of an expanded tensor what is
  stored, of a table the rows that it looks up) and writes each output once. Views, allocations
  and collectives move nothing. The backward pass is counted in the same way; the sums where a
  tensor has several readers belong to it, the addition into an existing `.grad` does not.
- Saved: each storage once. Parameters, buffers and constants do not count.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from rlplace.graph.fusion import Launch, fuse, traffic
from rlplace.graph.shapes import BATCHES
from rlplace.graph.types import Affine, Work

aten = torch.ops.aten

#: What a piece is given: ``param`` and ``buffer`` (states), ``constant`` (user inputs and tensors
#: of the prologue: no gradient, not counted), ``activation`` (made by another group), ``kept`` (an
#: activation whose maker already saves it, so that it is not counted twice).
Role = Literal["param", "buffer", "constant", "activation", "kept"]

_Phase = Literal["forward", "backward"]
_FREE = {"_unsafe_view", "detach", "lift_fresh", "empty", "empty_like", "empty_strided"}
_FREE |= {"new_empty", "new_empty_strided"}
#: What these keep (log-probabilities) is in fp32 at every precision.
_FP32_SAVERS = {"cross_entropy_loss", "vocab_cross_entropy", "log_softmax", "_log_softmax"}
_FP32_SAVERS |= {"row_cross_entropy"}
_LOOKUPS = {"embedding", "_embedding_bag", "index", "index_select", "gather"}
_OVERWRITES = {"copy_", "fill_", "zero_"}


@dataclass(frozen=True)
class Count:
    """The work of a piece, and which of its outputs it keeps for its own backward pass."""

    work: Work
    keeps: tuple[bool, ...]


def measure(
    module: fx.GraphModule,
    make_inputs: Callable[[int], Sequence[Any]],
    roles: Sequence[Role],
    stand_ins: Mapping[Any, Callable[..., Any]] | None = None,
) -> Work:
    """The work of a piece on one device.

    Args:
        module: Takes the inputs one by one and returns a tuple of tensors.
        make_inputs: Batch size -> inputs on the meta device (or numbers), `requires_grad` set as
            the piece will see it: on trainable parameters, and on the activations that a
            gradient flows back to.
        roles: One for each input.
        stand_ins: Function of a node -> what to call in its place, at no cost. A lowered piece
            names its collectives here: on the meta device they need no process group. The backward
            of a stand-in should only allocate (`new_empty`), which is free too.
    """
    return count(module, make_inputs, roles, stand_ins).work


def count(
    module: fx.GraphModule,
    make_inputs: Callable[[int], Sequence[Any]],
    roles: Sequence[Role],
    stand_ins: Mapping[Any, Callable[..., Any]] | None = None,
) -> Count:
    """As `measure`, with which outputs the piece keeps."""
    low, high = (_run(module, make_inputs(batch), roles, stand_ins or {}) for batch in BATCHES)

    def line(quantity: Callable[[_Tape], float]) -> Affine:
        return Affine.through(BATCHES[0], quantity(low), BATCHES[1], quantity(high))

    phases: tuple[_Phase, ...] = ("forward", "backward")
    fused = {phase: (low.fused(phase), high.fused(phase)) for phase in phases}
    states = [(x, role) for x, role in zip(high.inputs, roles, strict=True) if _is_state(role)]
    sizes = {_key(x): (x.numel(), role == "param" and x.requires_grad) for x, role in states}
    work = Work(
        flops=line(lambda tape: tape.sum("flops", "forward")),
        backward_flops=line(lambda tape: tape.sum("flops", "backward")),
        matmuls=sum(op.flops > 0 for op in high.ops if op.phase == "forward"),
        kernels=sum(op.phase == "forward" for op in high.ops),
        moved=line(lambda tape: tape.sum("moved", "forward")),
        backward_moved=line(lambda tape: tape.sum("moved", "backward")),
        fused_kernels=len(fused["forward"][1]),
        fused_moved=Affine.through(*_points(fused["forward"])),
        fused_backward_moved=Affine.through(*_points(fused["backward"])),
        attention_flops=line(lambda tape: tape.attention_flops),
        score_floats=line(lambda tape: tape.scores),
        saved=line(lambda tape: tape.saved()[0]),
        saved_bytes=line(lambda tape: tape.saved()[1]),
        logits_bytes=line(lambda tape: sum(size for size, _ in tape.logits().values())),
        transient=_transient(low, high),
        chunked_transient=_transient(low, high, but_logits=True),
        params=sum(size for size, trainable in sizes.values() if trainable),
        frozen_params=sum(size for size, trainable in sizes.values() if not trainable),
    )
    kept = {_key(tensor) for tensor in high.kept}
    return Count(work, tuple(_key(out) in kept for out in high.outputs))


def _points(moved: tuple[list[int], list[int]]) -> tuple[int, float, int, float]:
    """What all kernels move, at the two batch sizes."""
    return BATCHES[0], sum(moved[0]), BATCHES[1], sum(moved[1])


@dataclass
class _Op:
    """One op that launched something: elements of each float storage that it touched."""

    phase: _Phase
    moved: int
    touched: dict[int, int]
    launch: Launch

    @property
    def flops(self) -> int:
        return self.launch.flops


@dataclass
class _Tape(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Writes down every op that reaches a kernel, and every tensor that autograd keeps."""

    inputs: Sequence[Any]
    roles: Sequence[Role]
    phase: _Phase = "forward"
    muted: bool = False
    widened: bool = False
    scores: int = 0
    attention_flops: int = 0
    ops: list[_Op] = field(default_factory=list)
    kept: list[Tensor] = field(default_factory=list)
    wide: set[int] = field(default_factory=set)
    alive: list[Any] = field(default_factory=list)
    outputs: Sequence[Tensor] = ()
    gradients: Sequence[Tensor] = ()

    def __post_init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run the op and write it down."""
        out = func(*args, **(kwargs or {}))
        self.alive.append(out)
        name = _name(func)
        if self.muted or func.is_view or name in _FREE:
            return out
        flops = _flops(func, args, kwargs or {}, out)
        reads, writes = _tensors((args, kwargs)), _tensors(out)
        if name in _OVERWRITES:
            reads = reads[1:]
        self.record(flops, reads, writes, looks_up=name in _LOOKUPS)
        return out

    def record(
        self,
        flops: int,
        reads: Sequence[Tensor],
        writes: Sequence[Tensor],
        looks_up: bool = False,
    ) -> None:
        """Write an op down; one that looks something up reads as much of it as it writes."""
        floats = [tensor for tensor in writes if tensor.is_floating_point()]
        distinct = {id(tensor): tensor for tensor in reads if tensor.is_floating_point()}
        counted = floats if looks_up else list(distinct.values())
        moved = sum(map(_stored, counted)) + sum(map(_stored, floats))
        touched = {_key(tensor): _stored(tensor) for tensor in (*counted, *floats)}
        written = {_key(tensor): _stored(tensor) for tensor in floats}
        most = sum(written.values()) if looks_up else math.inf
        read = {_key(tensor): int(min(_stored(tensor), most)) for tensor in distinct.values()}
        self.ops.append(_Op(self.phase, moved, touched, Launch(flops, read, written)))

    def keep(self, tensor: Tensor) -> Tensor:
        """The pack hook: what autograd saves. Detached, so that no output refers to itself."""
        self.kept.append(tensor.detach())
        if self.widened:
            self.wide.add(_key(tensor))
        return self.kept[-1]

    def sum(self, quantity: Literal["flops", "moved"], phase: _Phase) -> int:
        """Sum over the ops of a phase."""
        return sum(getattr(op, quantity) for op in self.ops if op.phase == phase)

    def fused(self, phase: _Phase) -> list[int]:
        """Float elements that each kernel of a phase moves where memory-bound ops are fused."""
        launches = [op.launch for op in self.ops if op.phase == phase]
        kept = {_key(tensor) for tensor in (*self.kept, *self.outputs, *self.gradients)}
        return traffic(launches, fuse(launches), kept)

    def saved(self) -> tuple[float, float]:
        """(float elements, other bytes) of the storages that autograd keeps.

        Log-probabilities are kept in fp32 at every precision, so they count in bytes.
        """
        given = zip(self.inputs, self.roles, strict=True)
        seen = {_key(x) for x, role in given if role != "activation" and isinstance(x, Tensor)}
        floats = others = 0.0
        for tensor in self.kept:
            key, size = _key(tensor), tensor.untyped_storage().nbytes()
            if key in seen:
                continue
            seen.add(key)
            if key in self.wide or not tensor.is_floating_point():
                others += size
            else:
                floats += size / tensor.element_size()
        return floats, others

    def logits(self) -> dict[int, tuple[int, int]]:
        """(bytes, elements) of each storage of class scores that a loss keeps."""
        return {
            _key(tensor): (tensor.untyped_storage().nbytes(), tensor.numel())
            for tensor in self.kept
            if _key(tensor) in self.wide and tensor.is_floating_point() and tensor.ndim > 1
        }


def _run(
    module: fx.GraphModule,
    inputs: Sequence[Any],
    roles: Sequence[Role],
    stand_ins: Mapping[Any, Callable[..., Any]],
) -> _Tape:
    """The piece forward and backward, on tape."""
    tape = _Tape(inputs, roles)
    meter = _Meter(module, tape, stand_ins)
    with tape, torch.enable_grad():
        with torch.autograd.graph.saved_tensors_hooks(tape.keep, lambda tensor: tensor):
            tape.outputs = meter.run(*inputs)
        tape.phase = "backward"
        sources = [x for x in inputs if isinstance(x, Tensor) and x.requires_grad]
        ends = [out for out in tape.outputs if out.requires_grad]
        if sources and ends:
            seeds = [torch.empty_like(out) for out in ends]
            gradients = torch.autograd.grad(ends, sources, seeds, allow_unused=True)
            tape.gradients = [gradient for gradient in gradients if gradient is not None]
            _forget_states(tape, zip(sources, gradients, strict=True))
    return tape


def _forget_states(tape: _Tape, gradients: Any) -> None:
    """Parameters and their gradients are static memory: take them out of the working sets."""
    states = [x for x, role in zip(tape.inputs, tape.roles, strict=True) if _is_state(role)]
    static = {_key(x) for x in states}
    static |= {_key(g) for x, g in gradients if g is not None and _key(x) in static}
    for op in tape.ops:
        op.touched = {key: size for key, size in op.touched.items() if key not in static}


def _transient(low: _Tape, high: _Tape, *, but_logits: bool = False) -> Affine:
    """The largest working set of one op: inputs and outputs, without parameters.

    With `but_logits` of those ops that touch no class scores; all do where there are none.
    """
    sets = [[sum(op.touched.values()) for op in tape.ops] for tape in (low, high)]
    least = min((size for _, size in high.logits().values()), default=None) if but_logits else None
    # Class scores before a shift or a slice are a little larger than what the loss keeps of them.
    scored = [
        least is not None and any(least <= size < 2 * least for size in op.touched.values())
        for op in high.ops
    ]
    others = [index for index, touches in enumerate(scored) if not touches]
    if not others:
        return Affine()
    largest = max(others, key=lambda index: sets[1][index])
    return Affine.through(BATCHES[0], sets[0][largest], BATCHES[1], sets[1][largest])


class _Meter(fx.Interpreter):
    """Runs a piece with attention and dropout as GPU kernels do them."""

    def __init__(
        self, module: fx.GraphModule, tape: _Tape, stand_ins: Mapping[Any, Callable[..., Any]]
    ) -> None:
        super().__init__(module)
        self.tape = tape
        self.stand_ins = stand_ins

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Call what the node names, or what stands for it here."""
        self.tape.widened = _name(target) in _FP32_SAVERS
        if target in self.stand_ins:
            self.tape.muted = True
            out = self.stand_ins[target](*args, **kwargs)
            self.tape.muted = False
            return out
        if target is aten.scaled_dot_product_attention.default:
            return _attention(self.tape, *args, **kwargs)
        if target is aten.dropout.default and args[1] > 0.0 and args[2]:
            return torch.native_dropout(*args)[0]
        return super().call_function(target, args, kwargs)


def _attention(
    tape: _Tape,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    *_: Any,
    **__: Any,
) -> Tensor:
    tape.scores += query.shape[:-1].numel() * key.shape[-2]
    out: Tensor = _Flash.apply(tape, query, key, value, mask)  # type: ignore[no-untyped-call]
    return out


class _Flash(torch.autograd.Function):
    """The shapes, saved tensors and counts of a flash attention kernel (Dao et al., 2022)."""

    @staticmethod
    def forward(
        ctx: Any, tape: _Tape, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None
    ) -> Tensor:
        """Two matmuls: the scores, and the sum over values."""
        *lead, rows, _ = query.shape
        if value.shape[-1] == query.shape[-1]:
            out = torch.empty_like(query)  # kernels lay their output out as the query is
        else:
            out = query.new_empty(*lead[:-1], rows, *lead[-1:], value.shape[-1])
            out = out.transpose(-2, -3) if lead else out
        log_sums = query.new_empty(query.shape[:-1])
        ctx.save_for_backward(query, key, value, out, log_sums, mask)
        ctx.tape = tape
        pairs = 2 * log_sums.numel() * key.shape[-2]
        ctx.pairs = pairs
        flops = pairs * (query.shape[-1] + value.shape[-1])
        tape.attention_flops += flops
        tape.record(flops, [query, key, value], [out, log_sums])
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """Gradients of the scores, q, k and v; computing the scores again does not count."""
        (grad,) = grads
        query, key, value, out, log_sums, mask = ctx.saved_tensors
        _, *needs = ctx.needs_input_grad
        made = [
            torch.empty_like(x) if need else None
            for x, need in zip((query, key, value, mask), needs, strict=True)
        ]
        width, depth = query.shape[-1], value.shape[-1]
        inner = depth * (needs[0] or needs[1] or needs[3])
        flops = ctx.pairs * (inner + width * (needs[0] + needs[1]) + depth * needs[2])
        written = [x for x in made if x is not None]
        ctx.tape.record(flops, [grad, query, key, value, out, log_sums], written)
        return None, *made


def _grouped_mm(a: Tensor, b: Tensor, *_: Any, out_val: Tensor, **__: Any) -> int:
    """Each row of `a` meets one expert's matrix, so the expected tokens count, not all pairs."""
    if a.ndim == 3 and b.ndim == 2:
        return 2 * out_val.numel() * a.shape[-1]
    return 2 * a.numel() * b.shape[-1]


def _grouped_mm_backward(a: Tensor, b: Tensor, *_: Any, **__: Any) -> int:
    return 4 * a.numel() * b.shape[-1]


def _conv_backward(grad: Tensor, x: Tensor, weight: Tensor, *rest: Any, **_: Any) -> int:
    """As much as forward for each gradient; torch's own formula is too high with `groups`."""
    transposed: bool = rest[4]
    mask: list[bool] = rest[7]
    positions = x.numel() if transposed else grad.numel()
    return 2 * positions * weight[0].numel() * sum(mask[:2])


_OWN_FORMULAS: dict[str, Callable[..., int]] = {
    "aten::convolution_backward": _conv_backward,
    "aten::_grouped_mm": _grouped_mm,
    "transformers::grouped_mm_fallback": _grouped_mm,
    "transformers::grouped_mm_fallback_backward": _grouped_mm_backward,
}


def _flops(func: Any, args: Any, kwargs: Mapping[str, Any], out: Any) -> int:
    formula = _OWN_FORMULAS.get(func._schema.name) or flop_registry.get(func.overloadpacket)
    return int(formula(*args, **kwargs, out_val=out)) if formula else 0


def _is_state(role: Role) -> bool:
    return role in ("param", "buffer")


def _name(target: Any) -> str:
    return str(getattr(getattr(target, "overloadpacket", target), "__name__", target))


def _tensors(tree: Any) -> list[Tensor]:
    leaves = torch.utils._pytree.tree_leaves(tree)
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


def _key(tensor: Tensor) -> int:
    key: int = tensor.untyped_storage()._cdata
    return key


def _stored(tensor: Tensor) -> int:
    """Elements, of an expanded tensor those that exist."""
    return min(tensor.numel(), tensor.untyped_storage().nbytes() // tensor.element_size())
