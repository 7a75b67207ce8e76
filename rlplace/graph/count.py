"""What a piece of a program costs: FLOPs, traffic, and what autograd keeps for the backward pass.

A piece is run forward and backward on the meta device, where tensors have shapes and storages but
no memory, at two batch sizes; every count becomes the line through the two. So nothing here
models autograd: what is saved, which gradients are computed and which ops that takes is what
PyTorch itself does. Two ops are replaced by what a GPU kernel does: attention by a flash kernel
(it saves q, k, v, the output and one log-sum-exp a row, never the scores) and dropout by the fused
kernel (it saves a mask of one byte an element).

Rules of the counts, op by op as they reach the kernels:

- FLOPs: a multiply and an add are two; only matmuls, convolutions and attention count
  (`rlplace.graph.products`).
- Traffic: an op reads each of its floating-point inputs once (of an expanded tensor what is
  stored, of a table the rows that it looks up) and writes each output once. Views, allocations
  and collectives move nothing. An op that is two kernels (both gradients of a convolution) moves
  half with each. The backward pass is counted in the same way; the sums where a
  tensor has several readers belong to it, the addition into an existing `.grad` does not.
- Saved: each storage once. Parameters, buffers and constants do not count. Where all but
  matmul-like ops is redone, what those make stays if it is saved or read to redo the rest, and so
  do sums over devices, which stand for the summands.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, fx
from torch.utils._python_dispatch import TorchDispatchMode

from rlplace.graph.flow import Flow, only_added_into, staying
from rlplace.graph.fusion import Launch, fuse, traffic
from rlplace.graph.products import Measured, ProductRole, Size, attention_size, merge, sizes_of
from rlplace.graph.shapes import BATCHES
from rlplace.graph.sharding import axis
from rlplace.graph.types import Affine, Product, Work

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
#: What leads a sum into a sum: the gradient of a parameter comes out of a product through these.
_ADDS = {"add", "add_", "sum", "mul", "div", "clone", "copy_", "_to_copy", "cat", "new_empty"}
_ADDS |= {"select_backward", "slice_backward"}
_GATHERS = (axis.gather, axis.gather_copy)
_SUMS = (axis.reduce, axis.reduce_scatter)


@dataclass(frozen=True)
class Count:
    """What a piece costs, and which of its outputs it keeps.

    Args:
        work: On one device.
        keeps: Whether each output is kept for the piece's own backward pass.
        gathered: As `Layout.gathered`.
    """

    work: Work
    keeps: tuple[bool, ...]
    gathered: Affine


def count(
    module: fx.GraphModule,
    make_inputs: Callable[[int], Sequence[Any]],
    roles: Sequence[Role],
    stand_ins: Mapping[Any, Callable[..., Any]] | None = None,
) -> Count:
    """What a piece costs on one device, and what of it is kept.

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
        dropped_scores=line(lambda tape: tape.dropped_scores),
        saved=line(lambda tape: tape.saved()[0]),
        saved_bytes=line(lambda tape: tape.saved()[1]),
        kept_by_ops=line(lambda tape: tape.kept_by_ops()),
        logits_bytes=line(lambda tape: sum(size for size, _ in tape.logits().values())),
        transient=_transient(low, high),
        chunked_transient=_transient(low, high, but_logits=True),
        params=sum(size for size, trainable in sizes.values() if trainable),
        frozen_params=sum(size for size, trainable in sizes.values() if not trainable),
        products=_products(low, high),
    )
    kept = {_key(tensor) for tensor in high.kept}
    keeps = tuple(_key(out) in kept for out in high.outputs)
    return Count(work, keeps, line(lambda tape: tape.gathered()))


def _products(low: _Tape, high: _Tape) -> tuple[Product, ...]:
    """The matmul-like kernels of both passes; those of one op move equal parts."""
    weights = high.weight_gradients()

    def role(op: _Op, size: Size) -> ProductRole:
        if op.phase == "forward":
            return "forward"
        alone = weights.issuperset(op.launch.writes) and size.kind != "attention"
        return size.role or ("weight" if alone else "input")

    return merge(
        Measured(role(op, size), few, size, (less.moved / len(op.sizes), op.moved / len(op.sizes)))
        for less, op in zip(low.ops, high.ops, strict=True)
        for few, size in zip(less.sizes, op.sizes, strict=True)
    )


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
    sizes: tuple[Size, ...]

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
    dropped_scores: int = 0
    attention_flops: int = 0
    ops: list[_Op] = field(default_factory=list)
    flows: dict[_Phase, list[Flow]] = field(default_factory=lambda: {"forward": [], "backward": []})
    staying: dict[int, float] = field(default_factory=dict)
    gathers: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    kept: list[Tensor] = field(default_factory=list)
    wide: set[int] = field(default_factory=set)
    alive: list[Any] = field(default_factory=list)
    outputs: Sequence[Tensor] = ()
    gradients: Sequence[Tensor] = ()
    state_gradients: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run the op and write it down."""
        out = func(*args, **(kwargs or {}))
        self.alive.append(out)
        name = _name(func)
        if self.muted or func.is_view:
            return out
        reads, writes = _tensors((args, kwargs)), _tensors(out)
        if name not in _FREE:
            sizes = sizes_of(func, args, kwargs or {}, out)
            self.flow(reads, writes, stays=bool(sizes), adds=name in _ADDS)
            read = reads[1:] if name in _OVERWRITES else reads
            self.record(sizes, read, writes, looks_up=name in _LOOKUPS)
        elif name == "new_empty":  # a collective's result, which is made of what it is given
            self.flow(reads, writes, adds=True)
        return out

    def flow(
        self,
        reads: Sequence[Tensor],
        writes: Sequence[Tensor],
        *,
        stays: bool = False,
        adds: bool = False,
    ) -> None:
        """Write down which storages are made of which."""
        made = Flow(frozenset(map(_key, reads)), frozenset(map(_key, writes)), stays, adds)
        self.flows[self.phase].append(made)
        if stays:
            self.staying |= {_key(tensor): _elements(tensor) for tensor in writes}

    def record(
        self,
        sizes: tuple[Size, ...],
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
        launch = Launch(sum(size.flops for size in sizes), read, written)
        self.ops.append(_Op(self.phase, moved, touched, launch, sizes))

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

    def kept_by_ops(self) -> float:
        """Float elements that stay where all ops but matmul-like ones and attention are redone."""
        given = {_key(x) for x in self.inputs if isinstance(x, Tensor)}
        stay = staying(self.flows["forward"], [_key(tensor) for tensor in self.kept], given)
        return sum(self.staying[storage] for storage in stay)

    def gathered(self) -> float:
        """Float elements of gathered copies that are kept, beyond the shards that would do."""
        given = zip(self.inputs, self.roles, strict=True)
        there = {_key(x) for x, role in given if role != "activation" and isinstance(x, Tensor)}
        kept = {_key(tensor) for tensor in self.kept}
        copies = {key: parts for key, parts in self.gathers.items() if key in kept}
        shards = {_key(shard): shard for shard, _ in copies.values()}
        needed = (x for key, x in shards.items() if key not in kept | there)
        whole = sum(_elements(copy) for _, copy in copies.values())
        return whole - sum(map(_elements, needed))

    def weight_gradients(self) -> set[int]:
        """Storages that the backward pass needs for gradients of parameters alone."""
        ends = self.state_gradients
        others = {_key(gradient) for gradient in self.gradients} - ends
        return only_added_into(self.flows["backward"], ends, others)

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
            pairs = list(zip(sources, gradients, strict=True))
            states = {_key(x) for x in _states(tape)}
            made = [_key(g) for x, g in pairs if g is not None and _key(x) in states]
            tape.state_gradients = frozenset(made)
            _forget_states(tape)
    return tape


def _states(tape: _Tape) -> list[Tensor]:
    return [x for x, role in zip(tape.inputs, tape.roles, strict=True) if _is_state(role)]


def _forget_states(tape: _Tape) -> None:
    """Parameters and their gradients are static memory: take them out of the working sets."""
    static = {_key(x) for x in _states(tape)} | tape.state_gradients
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
            self.tape.flow(_tensors((args, kwargs)), _tensors(out), stays=target in _SUMS)
            if target in _GATHERS and out.is_floating_point():
                self.tape.gathers[_key(out)] = (args[0].detach(), out.detach())
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
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **_: Any,
) -> Tensor:
    scores = query.shape[:-1].numel() * key.shape[-2]
    tape.scores += scores
    tape.dropped_scores += scores if dropout_p > 0.0 else 0
    out: Tensor = _Flash.apply(tape, query, key, value, mask, is_causal)  # type: ignore[no-untyped-call]
    return out


class _Flash(torch.autograd.Function):
    """The shapes, saved tensors and counts of a flash attention kernel (Dao et al., 2022)."""

    @staticmethod
    def forward(
        ctx: Any,
        tape: _Tape,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        causal: bool,
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
        ctx.tape, ctx.causal = tape, causal
        pairs = 2 * log_sums.numel() * key.shape[-2]
        ctx.pairs = pairs
        flops = pairs * (query.shape[-1] + value.shape[-1])
        tape.attention_flops += flops
        read = [query, key, value] if mask is None else [query, key, value, mask]
        tape.flow(read, [out, log_sums], stays=True)
        size = attention_size(query, key, flops, causal)
        tape.record((size,), [query, key, value], [out, log_sums])
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """Gradients of the scores, q, k and v; computing the scores again does not count."""
        (grad,) = grads
        query, key, value, out, log_sums, mask = ctx.saved_tensors
        _, *needs, _ = ctx.needs_input_grad
        made = [
            torch.empty_like(x) if need else None
            for x, need in zip((query, key, value, mask), needs, strict=True)
        ]
        width, depth = query.shape[-1], value.shape[-1]
        inner = depth * (needs[0] or needs[1] or needs[3])
        flops = ctx.pairs * (inner + width * (needs[0] + needs[1]) + depth * needs[2])
        written = [x for x in made if x is not None]
        read = [grad, query, key, value, out, log_sums]
        ctx.tape.flow(read, written)
        size = attention_size(query, key, flops, ctx.causal)
        ctx.tape.record((size,), read, written)
        return None, *made, None


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


def _elements(tensor: Tensor) -> float:
    """Elements of the storage."""
    return tensor.untyped_storage().nbytes() / tensor.element_size()


def _stored(tensor: Tensor) -> int:
    """Elements, of an expanded tensor those that exist."""
    return min(tensor.numel(), tensor.untyped_storage().nbytes() // tensor.element_size())
