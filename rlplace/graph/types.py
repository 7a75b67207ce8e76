"""WHAT is placed: groups of ops, the tensors between them, and what each of them costs.

Everything here is plain frozen data without torch: an `OpGraph` is read from a cache and planned
with in milliseconds. Quantities are affine in the batch size (samples), so that every count is
exact for any micro-batch. Floating-point tensors are counted in elements (the precision of the
instance decides their bytes), all others (masks, indices) in bytes.
"""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Literal

#: Degrees of the tp axis at which layouts are looked for where nobody asks for others.
TP_DEGREES = (2, 4, 8)


@dataclass(frozen=True, slots=True)
class Affine:
    """A quantity that grows with the batch: ``base + per_sample * batch``."""

    base: float = 0.0
    per_sample: float = 0.0

    def __call__(self, batch: float) -> float:
        """The quantity for `batch` samples."""
        return self.base + self.per_sample * batch

    def __add__(self, other: Affine) -> Affine:
        return Affine(self.base + other.base, self.per_sample + other.per_sample)

    def __mul__(self, factor: float) -> Affine:
        return Affine(self.base * factor, self.per_sample * factor)

    @staticmethod
    def through(batch_1: int, value_1: float, batch_2: int, value_2: float) -> Affine:
        """The line through two measured points."""
        slope = (value_2 - value_1) / (batch_2 - batch_1)
        return Affine(value_1 - slope * batch_1, slope)


@dataclass(frozen=True, slots=True)
class Replicate:
    """Every device of the axis holds the whole tensor."""

    kind: Literal["replicate"] = "replicate"


@dataclass(frozen=True, slots=True)
class Shard:
    """Tensor dim `dim` is cut over the devices of the axis.

    Args:
        dim: The tensor dim, not negative.
        blocks: The dim is `blocks` equal runs (a fused q, k, v projection has 3) and each run is
            cut over the devices on its own; torch calls this a strided shard.
        run: If not 0, the dim is runs of this length, as many as the batch makes (rows of all
            sequences behind each other), and each run is cut on its own; `blocks` is 1 then.
        kind: Tells the three placements apart in a file.
    """

    dim: int
    blocks: int = 1
    run: int = 0
    kind: Literal["shard"] = "shard"


@dataclass(frozen=True, slots=True)
class Partial:
    """Every device of the axis holds one summand of the tensor."""

    kind: Literal["partial"] = "partial"


Placement = Replicate | Shard | Partial


@dataclass(frozen=True, slots=True)
class Collective:
    """A collective on the axis of a layout that it brings with it, once a micro-batch.

    Args:
        kind: ``all_reduce``, ``all_gather``, ``reduce_scatter`` or ``all_to_all``.
        phase: When it runs.
        floats: Elements of the *whole* tensor (what a rank holds after an all-gather, or gives
            to an all-reduce or reduce-scatter, or what all ranks give to an all-to-all). Exact
            for rows that are sent to their experts as well, whatever the routing.
    """

    kind: Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all"]
    phase: Literal["forward", "backward"]
    floats: Affine


@dataclass(frozen=True, slots=True)
class Product:
    """Equal matmul-like kernels of a group: as many, and as large, as its efficiency depends on.

    Sizes are those of one kernel, in samples of a micro-batch: `batch` products of a matrix of
    `rows` x `depth` with one of `depth` x `columns`. An attention kernel has a product for each
    head of each sample, of its queries (`rows`) with its keys (`columns`) over the width of a head
    (`depth`); a convolution the positions of its output (`rows`) with its output channels
    (`columns`) over input channels times the size of the kernel (`depth`), for each group of
    channels (`batch`); a grouped matmul an equal share of the rows for each expert (`batch`).

    Args:
        kind: ``matmul``, ``attention`` (all products of one attention kernel), ``conv`` or
            ``grouped``.
        role: ``forward``, or which gradient a kernel of the backward pass makes: that of an
            ``input``, or that of a ``weight``, which nothing in the backward pass waits for. The
            backward of attention is one kernel, of role ``input``.
        count: How many such kernels.
        batch: Number of independent products in one kernel.
        rows: Rows of the result of one product.
        columns: Columns of the result of one product.
        depth: Length of its sums.
        flops: FLOPs of all `count` kernels together.
        moved: Float elements that all of them together read and write.
        causal: Attention in which a query sees no later key, so that a kernel may skip half of
            `flops`, which counts all pairs.
    """

    kind: Literal["matmul", "attention", "conv", "grouped"]
    role: Literal["forward", "input", "weight"]
    count: int
    batch: Affine
    rows: Affine
    columns: Affine
    depth: Affine
    flops: Affine
    moved: Affine
    causal: bool = False


@dataclass(frozen=True, slots=True)
class Weight:
    """A matrix that one matmul of a group reads and nothing else: it can be cut into slices.

    Args:
        param: Position in `Group.params`.
        rows: Length of its dim 0, which is cut.
        columns: Length of its dim 1.
        linear: Whether slices give columns of the result (``linear``), or summands (``mm``).
        bias: Elements of a bias that is cut with it.
    """

    param: int
    rows: int
    columns: int
    linear: bool
    bias: int = 0

    @property
    def elements(self) -> int:
        """Of all its slices."""
        return self.rows * self.columns + self.bias


@dataclass(frozen=True, slots=True)
class Work:
    """What one micro-batch of a group costs on one device.

    Args:
        flops: Forward FLOPs of matmul-like ops (a multiply and an add are two).
        backward_flops: The same of the backward pass, recompute not counted.
        matmuls: Number of matmul-like ops of the forward pass; `flops / matmuls` is the size on
            which the efficiency of a kernel depends.
        kernels: Ops of the forward pass that launch something (views do not).
        moved: Float elements that the forward ops read and write, one by one, without fusion.
        backward_moved: The same of the backward pass.
        fused_kernels: `kernels`, where a compiler fuses memory-bound ops (`rlplace.graph.fusion`).
        fused_moved: `moved`, likewise.
        fused_backward_moved: `backward_moved`, likewise.
        attention_flops: The part of `flops` that attention kernels do: what redoing the core
            attention costs.
        score_floats: Elements of the attention score matrices: a math kernel writes, reads and
            saves them, a flash kernel does not. Not contained in the other fields. What it saves
            is the output of the softmax: one float an element (2 bytes at 16 bits).
        dropped_scores: The part of `score_floats` on which dropout acts. Of these a math kernel
            saves the output of the dropout as well, one float, and its mask, one byte: 5 bytes an
            element at 16 bits in all.
        saved: Float elements kept for the backward pass (by autograd's own rules, each storage
            once), the group's inputs included where it saves them.
        saved_bytes: Bytes kept for the backward pass of all other dtypes.
        kept_by_ops: The part of `saved` that stays where all ops but matmul-like ones and
            attention are redone in the backward pass: what those save or hand on to the rest. The
            group's own inputs are not counted.
        logits_bytes: The part of `saved_bytes` that is class scores: what a loss keeps of its
            logits, in fp32 at every precision.
        transient: Float elements of the largest working set of one op.
        chunked_transient: The same of the ops that touch no class scores: a bound where a loss
            goes through its tokens chunk by chunk. Equal to `transient` where nothing is kept in
            `logits_bytes`.
        params: Trainable parameter elements on this device.
        frozen_params: Frozen parameter elements and buffers on this device.
        products: The matmul-like ops of the forward and the backward pass by size; their FLOPs
            sum up to `flops` and `backward_flops`. Empty where only totals are known.
        weights: Parameters that can be gathered slice by slice, in the order of their use, as this
            device holds them.
    """

    flops: Affine = field(default_factory=Affine)
    backward_flops: Affine = field(default_factory=Affine)
    matmuls: int = 0
    kernels: int = 0
    moved: Affine = field(default_factory=Affine)
    backward_moved: Affine = field(default_factory=Affine)
    fused_kernels: int = 0
    fused_moved: Affine = field(default_factory=Affine)
    fused_backward_moved: Affine = field(default_factory=Affine)
    attention_flops: Affine = field(default_factory=Affine)
    score_floats: Affine = field(default_factory=Affine)
    dropped_scores: Affine = field(default_factory=Affine)
    saved: Affine = field(default_factory=Affine)
    saved_bytes: Affine = field(default_factory=Affine)
    kept_by_ops: Affine = field(default_factory=Affine)
    logits_bytes: Affine = field(default_factory=Affine)
    transient: Affine = field(default_factory=Affine)
    chunked_transient: Affine = field(default_factory=Affine)
    params: int = 0
    frozen_params: int = 0
    products: tuple[Product, ...] = ()
    weights: tuple[Weight, ...] = ()


@dataclass(frozen=True, slots=True)
class Layout:
    """A way to shard a group over an axis of a mesh.

    Args:
        name: ``replicate`` (every device does everything), ``shard`` (found by propagation, reads
            and writes whole tensors), ``sequence`` (the same, but sequences are cut between the
            groups), ``shard-through`` (other activations are cut between the groups), ``expert``
            (each device has whole experts and all tokens), ``expert-sequence`` (each device has
            whole experts and its own tokens, which are sent to their experts and back: `work` is
            that of balanced routing) or ``context`` (on the cp axis: sequences are cut,
            parameters are whole).
        degree: Size of the axis.
        work: What one device does.
        collectives: What it sends, forward and backward. On the cp axis the gradients of the
            parameters are summands, summed with those of the data-parallel replicas: not here.
        params: Placement of each parameter, in the order of `Group.params`.
        axis: Which one.
        reads: Placement of each activation that it reads, in the order of `OpGraph.reads`; empty
            if all are replicated.
        writes: Of each tensor that it hands on, in the order of `Group.writes`, likewise.
        gathered: Float elements of the gathered copies of cut activations that `work.saved`
            contains, without the shards that they are made of: what is not kept where the backward
            pass gathers again, as Megatron's does.
    """

    name: str
    degree: int
    work: Work
    collectives: tuple[Collective, ...] = ()
    params: tuple[Placement, ...] = ()
    axis: Literal["tp", "cp"] = "tp"
    reads: tuple[Placement, ...] = ()
    writes: tuple[Placement, ...] = ()
    gathered: Affine = field(default_factory=Affine)


@dataclass(frozen=True, slots=True)
class Cut:
    """Something that the tp axis cuts into equal parts: a degree has to divide its size.

    Args:
        what: Last part of the name of the module that makes it (``k_proj``).
        size: Number of units between which it may be cut (of a key projection its heads).
    """

    what: str
    size: int


@dataclass(frozen=True, slots=True)
class Structure:
    """What all isomorphic groups have in common; analysed once, however often it repeats.

    Args:
        hash: Structure hash of ops, shapes, constants and inner edges.
        work: One micro-batch on one device, unsharded.
        layouts: Sharded layouts of the tp axis, at each legal degree (``replicate`` is legal at
            every degree, has the work above, and is not listed). Activations between groups are
            replicated: any two of them may be neighbours.
        cuts: What its sharded layouts cut; empty where it has none.
        bordered: Layouts that cut activations between groups, on either axis.
    """

    hash: str
    work: Work
    layouts: tuple[Layout, ...] = ()
    cuts: tuple[Cut, ...] = ()
    bordered: tuple[Layout, ...] = ()

    @property
    def tp_limit(self) -> int:
        """Its legal tp degrees are the divisors of this number; 0 if nothing limits them."""
        return math.gcd(*(cut.size for cut in self.cuts))

    def layouts_at(self, degree: int) -> tuple[Layout, ...]:
        """All layouts at a degree of the tp axis, ``replicate`` first."""
        sharded = tuple(layout for layout in self.layouts if layout.degree == degree)
        return (Layout("replicate", degree, self.work), *sharded)

    def layouts_with(self, axis: Literal["tp", "cp"], degree: int) -> tuple[Layout, ...]:
        """All layouts on an axis, those that cut activations between groups last."""
        whole = self.layouts_at(degree) if axis == "tp" else ()
        found = (lay for lay in self.bordered if (lay.axis, lay.degree) == (axis, degree))
        return (*whole, *found)


@dataclass(frozen=True, slots=True)
class Group:
    """The unit that is placed: a convex set of ops.

    Args:
        index: Position in `OpGraph.groups`, which is a topological order.
        name: Name that a person recognises, from the module path (``layers.3.mlp``).
        structure: Index into `OpGraph.structures`.
        ops: Names of the nodes of the exported program, in order.
        modules: Fully qualified names of the modules that the ops come from.
        params: Fully qualified names of its parameters and buffers; a tied parameter is named in
            every group that uses it.
        writes: Names of the nodes whose tensors it hands on, to other groups or to the caller.
    """

    index: int
    name: str
    structure: int
    ops: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()
    params: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Edge:
    """A tensor that one group makes and another reads (one edge for each reader).

    Args:
        src: Index of the group that makes it.
        dst: Index of the group that reads it; always larger than `src`.
        tensor: Name of the node of the exported program that makes it.
        floats: Elements, if it is a floating-point tensor.
        other_bytes: Bytes, if it is not.
    """

    src: int
    dst: int
    tensor: str
    floats: Affine = field(default_factory=Affine)
    other_bytes: Affine = field(default_factory=Affine)


@dataclass(frozen=True)
class OpGraph:
    """A captured model, cut into groups.

    Args:
        name: Name of the model.
        groups: In topological order.
        edges: Tensors between groups. Graph inputs (ids, labels) are not edges: every stage that
            reads one gets it from its own data loader.
        structures: Descriptions shared by isomorphic groups.
        tokens_per_sample: Length of the sequence, 1 where a sample is one item.
        tied: Parameter elements of each tied parameter: (name, elements).
        source: How to build the model again: library name and arguments; empty for a user's own
            module.
    """

    name: str
    groups: tuple[Group, ...]
    edges: tuple[Edge, ...]
    structures: tuple[Structure, ...]
    tokens_per_sample: int = 1
    tied: tuple[tuple[str, int], ...] = ()
    source: dict[str, str | int | float | bool | None] = field(default_factory=dict)

    def structure(self, group: int) -> Structure:
        """The description of a group."""
        return self.structures[self.groups[group].structure]

    def reads(self, group: int) -> tuple[str, ...]:
        """Names of the tensors of other groups that a group reads, in the order of its edges."""
        return tuple(edge.tensor for edge in self.edges if edge.dst == group)

    def tp_degrees(self, up_to: int) -> tuple[int, ...]:
        """Degrees of the tp axis, 1 first, that divide what the groups cut."""
        limits = [self.structures[index].tp_limit for index in self._limiting]
        degrees = range(1, up_to + 1)
        return tuple(d for d in degrees if all(limit % d == 0 for limit in limits))

    def tp_refusal(self, degree: int) -> str | None:
        """Why a degree is not in `tp_degrees`: a group and its sizes; None if it is."""
        for index in self._limiting:
            sizes = [f"{cut.what} {cut.size}" for cut in self.structures[index].cuts]
            wrong = [
                s
                for s, c in zip(sizes, self.structures[index].cuts, strict=True)
                if c.size % degree
            ]
            if wrong:
                name = next(group.name for group in self.groups if group.structure == index)
                return f"tp={degree} does not divide {', '.join(wrong)} of {name}"
        return None

    @cached_property
    def _limiting(self) -> tuple[int, ...]:
        """Structures that limit the degree of the tp axis, those with the most FLOPs first.

        They are those that repeat, or all if none does: a head with an odd vocabulary does not
        forbid to shard the layers, it runs whole. So does a structure that would leave no degree.
        """
        uses = [group.structure for group in self.groups]
        cutting = [index for index, found in enumerate(self.structures) if found.tp_limit]
        limiting = [index for index in cutting if uses.count(index) > 1] or cutting
        limiting.sort(key=lambda i: -uses.count(i) * self.structures[i].work.flops(1.0))
        common, kept = 0, []
        for index in limiting:
            shared = math.gcd(common, self.structures[index].tp_limit)
            if shared > 1:
                common = shared
                kept.append(index)
        return tuple(kept)

    @cached_property
    def fingerprint(self) -> str:
        """Hash of all that a plan depends on; equal for equal graphs on any machine."""
        text = json.dumps(asdict(self), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @cached_property
    def params(self) -> int:
        """Trainable parameter elements of the model, each tied parameter counted once."""
        total = sum(self.structure(group.index).work.params for group in self.groups)
        uses = [name for group in self.groups for name in group.params]
        return total - sum((uses.count(name) - 1) * size for name, size in self.tied)

    @cached_property
    def model_flops(self) -> Affine:
        """Forward and backward FLOPs of the whole model, recompute not counted."""
        total = Affine()
        for group in self.groups:
            work = self.structure(group.index).work
            total = total + work.flops + work.backward_flops
        return total

    @cached_property
    def crossings(self) -> tuple[tuple[Affine, Affine], ...]:
        """(float elements, other bytes) that cross the cut before each group, 0 to n inclusive.

        A tensor that is read far downstream is relayed from stage to stage, so it counts once at
        every cut between its maker and its last reader.
        """
        last: dict[tuple[int, str], Edge] = {}
        for edge in self.edges:
            key = (edge.src, edge.tensor)
            if key not in last or edge.dst > last[key].dst:
                last[key] = edge
        floats = [Affine() for _ in range(len(self.groups) + 1)]
        others = [Affine() for _ in range(len(self.groups) + 1)]
        for edge in last.values():
            for cut in range(edge.src + 1, edge.dst + 1):
                floats[cut] = floats[cut] + edge.floats
                others[cut] = others[cut] + edge.other_bytes
        return tuple(zip(floats, others, strict=True))
