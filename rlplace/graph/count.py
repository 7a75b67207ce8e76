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

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from rlplace.graph.flash import flash_attention
from rlplace.graph.products import Measured, ProductRole, Size, merge
from rlplace.graph.shapes import BATCHES
from rlplace.graph.sharding import axis
from rlplace.graph.tape import Op, Phase, Role, Tape, is_state, key_of, op_name, tensors_in
from rlplace.graph.types import Affine, Product, Work

aten = torch.ops.aten

#: What these keep (log-probabilities) is in fp32 at every precision.
_FP32_SAVERS = {"cross_entropy_loss", "vocab_cross_entropy", "log_softmax", "_log_softmax"}
_FP32_SAVERS |= {"row_cross_entropy"}
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

    def line(quantity: Callable[[Tape], float]) -> Affine:
        return Affine.through(BATCHES[0], quantity(low), BATCHES[1], quantity(high))

    phases: tuple[Phase, ...] = ("forward", "backward")
    fused = {phase: (low.fused(phase), high.fused(phase)) for phase in phases}
    states = [(x, role) for x, role in zip(high.inputs, roles, strict=True) if is_state(role)]
    sizes = {key_of(x): (x.numel(), role == "param" and x.requires_grad) for x, role in states}
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
    kept = {key_of(tensor) for tensor in high.kept}
    keeps = tuple(key_of(out) in kept for out in high.outputs)
    return Count(work, keeps, line(lambda tape: tape.gathered()))


def _products(low: Tape, high: Tape) -> tuple[Product, ...]:
    """The matmul-like kernels of both passes; those of one op move equal parts."""
    weights = high.weight_gradients()

    def role(op: Op, size: Size) -> ProductRole:
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


def _run(
    module: fx.GraphModule,
    inputs: Sequence[Any],
    roles: Sequence[Role],
    stand_ins: Mapping[Any, Callable[..., Any]],
) -> Tape:
    """The piece forward and backward, on tape."""
    tape = Tape(inputs, roles)
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
            states = {key_of(x) for x in tape.states()}
            made = [key_of(g) for x, g in pairs if g is not None and key_of(x) in states]
            tape.state_gradients = frozenset(made)
            _forget_states(tape)
    return tape


def _forget_states(tape: Tape) -> None:
    """Parameters and their gradients are static memory: take them out of the working sets."""
    static = {key_of(x) for x in tape.states()} | tape.state_gradients
    for op in tape.ops:
        op.touched = {key: size for key, size in op.touched.items() if key not in static}


def _transient(low: Tape, high: Tape, *, but_logits: bool = False) -> Affine:
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
        self, module: fx.GraphModule, tape: Tape, stand_ins: Mapping[Any, Callable[..., Any]]
    ) -> None:
        super().__init__(module)
        self.tape = tape
        self.stand_ins = stand_ins

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Call what the node names, or what stands for it here."""
        self.tape.widened = op_name(target) in _FP32_SAVERS
        if target in self.stand_ins:
            self.tape.muted = True
            out = self.stand_ins[target](*args, **kwargs)
            self.tape.muted = False
            self.tape.flow(tensors_in((args, kwargs)), tensors_in(out), stays=target in _SUMS)
            if target in _GATHERS and out.is_floating_point():
                self.tape.gathers[key_of(out)] = (args[0].detach(), out.detach())
            return out
        if target is aten.scaled_dot_product_attention.default:
            return flash_attention(self.tape, *args, **kwargs)
        if target is aten.dropout.default and args[1] > 0.0 and args[2]:
            return torch.native_dropout(*args)[0]
        return super().call_function(target, args, kwargs)
