"""A tape of a run of a piece: every op that reaches a kernel, every tensor that autograd keeps.

Rules of the counts are in `rlplace.graph.count`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rlplace.graph.flow import Flow, only_added_into, staying
from rlplace.graph.fusion import Launch, fuse, traffic
from rlplace.graph.products import Size, sizes_of

#: What a piece is given: ``param`` and ``buffer`` (states), ``constant`` (user inputs and tensors
#: of the prologue: no gradient, not counted), ``activation`` (made by another group), ``kept`` (an
#: activation whose maker already saves it, so that it is not counted twice).
Role = Literal["param", "buffer", "constant", "activation", "kept"]

#: Of a run of a piece.
Phase = Literal["forward", "backward"]
_FREE = {"_unsafe_view", "detach", "lift_fresh", "empty", "empty_like", "empty_strided"}
_FREE |= {"new_empty", "new_empty_strided"}
_LOOKUPS = {"embedding", "_embedding_bag", "index", "index_select", "gather"}
_OVERWRITES = {"copy_", "fill_", "zero_"}
#: What leads a sum into a sum: the gradient of a parameter comes out of a product through these.
_ADDS = {"add", "add_", "sum", "mul", "div", "clone", "copy_", "_to_copy", "cat", "new_empty"}
_ADDS |= {"select_backward", "slice_backward"}


@dataclass
class Op:
    """One op that launched something: elements of each float storage that it touched."""

    phase: Phase
    moved: int
    touched: dict[int, int]
    launch: Launch
    sizes: tuple[Size, ...]

    @property
    def flops(self) -> int:
        """Of all its products."""
        return self.launch.flops


@dataclass
class Tape(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch: untyped
    """Writes down every op that reaches a kernel, and every tensor that autograd keeps."""

    inputs: Sequence[Any]
    roles: Sequence[Role]
    phase: Phase = "forward"
    muted: bool = False
    widened: bool = False
    scores: int = 0
    dropped_scores: int = 0
    attention_flops: int = 0
    ops: list[Op] = field(default_factory=list)
    flows: dict[Phase, list[Flow]] = field(default_factory=lambda: {"forward": [], "backward": []})
    staying: dict[int, float] = field(default_factory=dict)
    gathers: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    kept: list[Tensor] = field(default_factory=list)
    wide: set[int] = field(default_factory=set)
    alive: list[Any] = field(default_factory=list)
    outputs: Sequence[Tensor] = ()
    gradients: Sequence[Tensor] = ()
    state_gradients: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch: untyped

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run the op and write it down."""
        out = func(*args, **(kwargs or {}))
        self.alive.append(out)
        name = op_name(func)
        if self.muted or func.is_view:
            return out
        reads, writes = tensors_in((args, kwargs)), tensors_in(out)
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
        made = Flow(frozenset(map(key_of, reads)), frozenset(map(key_of, writes)), stays, adds)
        self.flows[self.phase].append(made)
        if stays:
            self.staying |= {key_of(tensor): elements_of(tensor) for tensor in writes}

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
        touched = {key_of(tensor): _stored(tensor) for tensor in (*counted, *floats)}
        written = {key_of(tensor): _stored(tensor) for tensor in floats}
        most = sum(written.values()) if looks_up else math.inf
        read = {key_of(tensor): int(min(_stored(tensor), most)) for tensor in distinct.values()}
        launch = Launch(sum(size.flops for size in sizes), read, written)
        self.ops.append(Op(self.phase, moved, touched, launch, sizes))

    def keep(self, tensor: Tensor) -> Tensor:
        """The pack hook: what autograd saves. Detached, so that no output refers to itself."""
        self.kept.append(tensor.detach())
        if self.widened:
            self.wide.add(key_of(tensor))
        return self.kept[-1]

    def sum(self, quantity: Literal["flops", "moved"], phase: Phase) -> int:
        """Sum over the ops of a phase."""
        return sum(getattr(op, quantity) for op in self.ops if op.phase == phase)

    def fused(self, phase: Phase) -> list[int]:
        """Float elements that each kernel of a phase moves where memory-bound ops are fused."""
        launches = [op.launch for op in self.ops if op.phase == phase]
        kept = {key_of(tensor) for tensor in (*self.kept, *self.outputs, *self.gradients)}
        return traffic(launches, fuse(launches), kept)

    def saved(self) -> tuple[float, float]:
        """(float elements, other bytes) of the storages that autograd keeps.

        Log-probabilities are kept in fp32 at every precision, so they count in bytes.
        """
        given = zip(self.inputs, self.roles, strict=True)
        seen = {key_of(x) for x, role in given if role != "activation" and isinstance(x, Tensor)}
        floats = others = 0.0
        for tensor in self.kept:
            key, size = key_of(tensor), tensor.untyped_storage().nbytes()
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
        given = {key_of(x) for x in self.inputs if isinstance(x, Tensor)}
        stay = staying(self.flows["forward"], [key_of(tensor) for tensor in self.kept], given)
        return sum(self.staying[storage] for storage in stay)

    def gathered(self) -> float:
        """Float elements of gathered copies that are kept, beyond the shards that would do."""
        given = zip(self.inputs, self.roles, strict=True)
        there = {key_of(x) for x, role in given if role != "activation" and isinstance(x, Tensor)}
        kept = {key_of(tensor) for tensor in self.kept}
        copies = {key: parts for key, parts in self.gathers.items() if key in kept}
        shards = {key_of(shard): shard for shard, _ in copies.values()}
        needed = (x for key, x in shards.items() if key not in kept | there)
        whole = sum(elements_of(copy) for _, copy in copies.values())
        return whole - sum(map(elements_of, needed))

    def states(self) -> list[Tensor]:
        """Parameters and buffers."""
        return [x for x, role in zip(self.inputs, self.roles, strict=True) if is_state(role)]

    def weight_gradients(self) -> set[int]:
        """Storages that the backward pass needs for gradients of parameters alone."""
        ends = self.state_gradients
        others = {key_of(gradient) for gradient in self.gradients} - ends
        return only_added_into(self.flows["backward"], ends, others)

    def logits(self) -> dict[int, tuple[int, int]]:
        """(bytes, elements) of each storage of class scores that a loss keeps."""
        return {
            key_of(tensor): (tensor.untyped_storage().nbytes(), tensor.numel())
            for tensor in self.kept
            if key_of(tensor) in self.wide and tensor.is_floating_point() and tensor.ndim > 1
        }


def is_state(role: Role) -> bool:
    """Whether it is static memory."""
    return role in ("param", "buffer")


def op_name(target: Any) -> str:
    """Name of an op without its overload, or of a function."""
    return str(getattr(getattr(target, "overloadpacket", target), "__name__", target))


def tensors_in(tree: Any) -> list[Tensor]:
    """All tensors of nested arguments or results."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def key_of(tensor: Tensor) -> int:
    """Names the storage as long as the tensor lives."""
    key: int = tensor.untyped_storage()._cdata
    return key


def elements_of(tensor: Tensor) -> float:
    """Elements of the storage."""
    return tensor.untyped_storage().nbytes() / tensor.element_size()


def _stored(tensor: Tensor) -> int:
    """Elements, of an expanded tensor those that exist."""
    return min(tensor.numel(), tensor.untyped_storage().nbytes() // tensor.element_size())
