"""THE QUESTION AND THE DECISION: what a planner is asked, and what it answers."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Literal

from rlplace.cluster.types import Cluster
from rlplace.errors import InputError, nearest_names
from rlplace.graph.types import Affine, OpGraph, Weight, Work
from rlplace.plan.degrees import refuse_degree, refuse_unknown_degree, usable_degrees
from rlplace.plan.frameworks import Framework, framework


@dataclass(frozen=True, slots=True)
class Precision:
    """Bytes a trainable parameter, and the dtype of matmuls and activations.

    Args:
        weight: Bytes of a parameter element as it is used.
        gradient: Bytes of a gradient element.
        master: Bytes of the fp32 master copy, 0 where there is none.
        state: Bytes of one optimizer moment.
        activation: Bytes of an activation element.
        compute: Key into `DeviceKind.peak_flops`.
    """

    weight: int
    gradient: int
    master: int
    state: int
    activation: int
    compute: str


PRECISIONS: dict[str, Precision] = {
    "fp32": Precision(4, 4, 0, 4, 4, "fp32"),
    "bf16-mixed": Precision(2, 2, 4, 4, 2, "bf16"),
    "fp16-mixed": Precision(2, 2, 4, 4, 2, "fp16"),
    "bf16-mixed-fp32grad": Precision(2, 4, 4, 4, 2, "bf16"),
    "bf16": Precision(2, 2, 0, 2, 2, "bf16"),
    "fp8-mixed": Precision(2, 2, 4, 4, 2, "fp8"),
    "fp8-mixed-fp32grad": Precision(2, 4, 4, 4, 2, "fp8"),
}

#: Optimizer name -> (moments kept, bytes of one moment or None for the precision's own).
OPTIMIZERS: dict[str, tuple[int, int | None]] = {
    "adamw": (2, None),
    "adamw-8bit": (2, 1),
    "sgd": (0, None),
    "sgd-momentum": (1, None),
}

#: What is taken where the user names no precision: the first that every device kind has.
_PREFERRED = ("bf16-mixed", "fp16-mixed", "fp32")

ATTENTION_KERNELS = ("flash", "math")

#: See `rlplace.plan.schedules`.
SCHEDULE_NAMES = ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-v")

#: From what keeps most to what keeps least.
RECOMPUTE_MODES = ("none", "attention", "ops", "full")

#: Beside them: redone as one with the group before it.
JOINED = "joined"


def redoes_attention(work: Work) -> bool:
    """Whether a group has a core attention that the recompute mode ``attention`` could redo."""
    return work.attention_flops != Affine() or work.score_floats != Affine()


def default_precision(cluster: Cluster) -> str:
    """The first of bf16-mixed, fp16-mixed and fp32 that every device kind of a cluster has."""
    for name in _PREFERRED:
        if all(PRECISIONS[name].compute in kind.peak_flops for kind in cluster.kinds):
            return name
    return _PREFERRED[-1]


@dataclass(frozen=True)
class Instance:
    """What a planner is asked.

    Args:
        graph: The model.
        cluster: The devices.
        global_batch: Samples of one optimizer step.
        precision: A name of `PRECISIONS`.
        optimizer: A name of `OPTIMIZERS`.
        attention: ``flash`` or ``math``: whether score matrices are kept in memory.
        memory_margin: Share of the device memory that is kept free.
        zero_levels: ZeRO levels that a planner may choose.
        recompute_modes: Recompute modes that a planner may choose. ``attention`` is offered only
            where it frees something, which is with the ``math`` kernel.
        offload: Whether a planner may keep optimizer states in the memory of the host.
        slices: Numbers of slices into which a planner may cut weights that are gathered (ZeRO-3).
        schedules: Names of schedules that a planner may choose beside 1F1B, which each knows; only
            some planners choose.
        tp_degrees: Degrees of the tp axis that a planner may choose; None for all that are legal
            and have layouts.
        loss_chunks: Equal chunks of tokens through which the loss goes, forward and backward one
            after the other (1: all at once), so that the class scores of one chunk exist at a
            time. The runtime makes them again in the backward pass.
        fused: Whether a compiler fuses the memory-bound ops (`rlplace.graph.fusion`). Estimated
            only: the runtime runs op by op.
        framework: What runs the program: a name of `rlplace.plan.frameworks`, or constants of
            one's own. ``torch`` is what rlplace itself runs.

    Raises:
        InputError: On an unknown name or a value out of range.
    """

    graph: OpGraph
    cluster: Cluster
    global_batch: int
    precision: str = "bf16-mixed"
    optimizer: str = "adamw"
    attention: str = "flash"
    memory_margin: float = 0.08
    zero_levels: tuple[int, ...] = (0, 1, 2, 3)
    recompute_modes: tuple[str, ...] = ("none", "full")
    offload: bool = False
    slices: tuple[int, ...] = (1,)
    schedules: tuple[str, ...] = ("1f1b",)
    tp_degrees: tuple[int, ...] | None = None
    loss_chunks: int = 1
    fused: bool = False
    framework: str | Framework = "torch"

    def __post_init__(self) -> None:
        if self.global_batch < 1:
            raise InputError("global_batch", self.global_batch, "must be at least 1", 1)
        if self.loss_chunks < 1:
            raise InputError("loss_chunks", self.loss_chunks, "must be at least 1", 1)
        known: tuple[tuple[str, str, tuple[str, ...]], ...] = (
            ("precision", self.precision, tuple(PRECISIONS)),
            ("optimizer", self.optimizer, tuple(OPTIMIZERS)),
            ("attention", self.attention, ATTENTION_KERNELS),
            *(("schedules", name, SCHEDULE_NAMES) for name in self.schedules),
        )
        for name, value, legal in known:
            if value not in legal:
                rule = f"must be one of {', '.join(legal)}"
                raise InputError(name, value, rule, nearest_names(value, legal))
        if not 0.0 <= self.memory_margin < 1.0:
            raise InputError("memory_margin", self.memory_margin, "must be in [0, 1)", 0.08)
        for name, chosen, all_of in (
            ("zero_levels", self.zero_levels, (0, 1, 2, 3)),
            ("recompute_modes", self.recompute_modes, RECOMPUTE_MODES),
        ):
            if not chosen or not set(chosen) <= set(all_of):
                raise InputError(name, chosen, f"some of {all_of}, at least one", all_of)
        if not self.slices or min(self.slices) < 1:
            raise InputError("slices", self.slices, "numbers of slices, each at least 1", (1,))
        assert self.execution  # an unknown framework is refused here
        self._check_tp_degrees()
        self._check_kinds()

    def _check_kinds(self) -> None:
        for kind in self.cluster.kinds:
            if self.bytes.compute not in kind.peak_flops:
                rule = f"{kind.name} has no {self.bytes.compute}"
                possible = [n for n, p in PRECISIONS.items() if p.compute in kind.peak_flops]
                raise InputError("precision", self.precision, rule, ", ".join(possible))

    @cached_property
    def execution(self) -> Framework:
        """The constants of the framework."""
        return framework(self.framework) if isinstance(self.framework, str) else self.framework

    @property
    def fusion(self) -> float:
        """Share of what fusing memory-bound ops could save which is saved."""
        return 1.0 if self.fused else self.execution.fusion

    def traffic(self, work: Work) -> tuple[float, Affine, Affine]:
        """Kernels of the forward pass, float elements that it moves and that the backward moves."""
        fusion = self.fusion
        pairs = (
            (work.moved, work.fused_moved),
            (work.backward_moved, work.fused_backward_moved),
        )
        forward, backward = (one * (1.0 - fusion) + other * fusion for one, other in pairs)
        kernels = work.kernels + fusion * (work.fused_kernels - work.kernels)
        return kernels, forward, backward

    @property
    def bytes(self) -> Precision:
        """The byte sizes of the instance's precision."""
        return PRECISIONS[self.precision]

    def _check_tp_degrees(self) -> None:
        if self.tp_degrees is None:
            return
        if not self.tp_degrees:
            raise InputError("tp_degrees", self.tp_degrees, "at least one degree, or None", (1,))
        room = Counter((d.node, d.kind) for d in self.cluster.devices)
        most = max(room.values(), default=1)
        for degree in self.tp_degrees:
            if degree < 1:
                raise InputError("tp_degrees", degree, "a degree is at least 1", 1)
            refuse_degree(self.graph, degree, "tp_degrees", range(1, most + 1))
            refuse_unknown_degree(self.graph, degree, "tp_degrees")
            if degree > most:
                rule = (
                    f"a tp group is inside a node, and no node has more than {most} equal devices"
                )
                fitting = max(d for d in usable_degrees(self.graph) if d <= most)
                raise InputError("tp_degrees", degree, rule, fitting)

    @cached_property
    def offered_tp(self) -> tuple[int, ...]:
        """Degrees of the tp axis that a planner may choose, in ascending order."""
        usable = usable_degrees(self.graph)
        return usable if self.tp_degrees is None else tuple(sorted({*self.tp_degrees}))

    @cached_property
    def offered_recompute(self) -> tuple[str, ...]:
        """The recompute modes that are worth a try, from what keeps most to what keeps least.

        A flash kernel keeps no score matrix, so redoing the core attention would free nothing.
        """
        modes = [mode for mode in RECOMPUTE_MODES if mode in self.recompute_modes]
        if self.attention != "math" and "attention" in modes:
            modes.remove("attention")
        return tuple(modes) or ("none",)

    def recompute_options(self, work: Work) -> tuple[str, ...]:
        """`offered_recompute` for a group; without a core attention there is none to redo."""
        offered = self.offered_recompute
        if "attention" not in offered or redoes_attention(work):
            return offered
        return tuple(mode for mode in offered if mode != "attention") or ("none",)

    @property
    def offered_offload(self) -> tuple[bool, ...]:
        """Whether a planner may choose to offload a group's optimizer states, and not to."""
        able = all(kind.host_bandwidth for kind in self.cluster.kinds)
        return (False, True) if self.offload and able else (False,)

    def slice_options(
        self, work: Work, zero: int, recompute: str, of: tuple[int, ...] = ()
    ) -> tuple[int, ...]:
        """Which of `slices` a group can have on more than one shard; 1 where it can have none.

        Args:
            work: Of the group.
            zero: Its ZeRO level.
            recompute: Its recompute mode.
            of: Numbers in place of `slices`.
        """
        offered = of or self.slices
        chunked = self.loss_chunks > 1 and work.logits_bytes != Affine()
        if offered == (1,) or zero != 3 or recompute != "none" or chunked:
            return (1,)
        rows = [weight.rows for weight in work.weights]
        found = {n for n in offered if any(size % n == 0 for size in rows)}
        return tuple(sorted(found)) or (1,)

    @property
    def optimizer_bytes(self) -> int:
        """Bytes of optimizer state a trainable parameter, master copy included."""
        moments, size = OPTIMIZERS[self.optimizer]
        return moments * (self.bytes.state if size is None else size) + self.bytes.master

    def memory_limit(self, device: int) -> float:
        """Bytes that a plan may use on a device."""
        return self.cluster.kind(device).memory * (1.0 - self.memory_margin)


@dataclass(frozen=True)
class Mesh:
    """The devices of one stage along its axes, row-major in the order of the fields.

    Args:
        devices: Global ranks; their number is the product of the degrees.
        dp_replicate: Replicas that each hold all states.
        dp_shard: Replicas over which ZeRO shards states.
        cp: Context parallel degree: so many devices share the sequences of a replica, and hold the
            same parameters, which ZeRO shards over them too.
        tp: Tensor parallel degree; neighbours in `devices`.
    """

    devices: tuple[int, ...]
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        """Kept, for searches look costs up by meshes of up to a thousand devices."""
        return hash((self.devices, self.dp_replicate, self.dp_shard, self.cp, self.tp))

    @property
    def dp(self) -> int:
        """Replicas that see different samples."""
        return self.dp_replicate * self.dp_shard

    @property
    def shards(self) -> int:
        """Devices over which ZeRO shards states."""
        return self.dp_shard * self.cp

    def tp_groups(self) -> tuple[tuple[int, ...], ...]:
        """Devices of each tp group."""
        starts = range(0, len(self.devices), self.tp)
        return tuple(self.devices[start : start + self.tp] for start in starts)

    def cp_groups(self) -> tuple[tuple[int, ...], ...]:
        """Devices that share the sequences of a replica, of each coordinate on tp."""
        size = self.cp * self.tp
        return tuple(
            self.devices[start + offset : start + size : self.tp]
            for start in range(0, len(self.devices), size)
            for offset in range(self.tp)
        )

    @property
    def firsts(self) -> tuple[int, ...]:
        """The first device of each replica."""
        return self.devices[:: self.cp * self.tp]

    def dp_groups(self) -> tuple[tuple[int, ...], ...]:
        """Devices that hold the same parameters, of all replicas and the whole cp axis."""
        return tuple(self.devices[offset :: self.tp] for offset in range(self.tp))


Recompute = Literal["none", "attention", "ops", "full", "joined"]


@dataclass(frozen=True, slots=True)
class GroupChoice:
    """How one group runs on the mesh of its stage.

    Args:
        layout: Name of a `Layout` of its structure at the mesh's tp degree.
        zero: ZeRO level 0-3 over dp_shard (0 = DDP; 1, 2 = FSDP2 `reshard_after_forward=False`;
            3 = `True`).
        recompute: ``none`` keeps what autograd saves; ``attention`` redoes the core attention
            (scores, softmax and the sum over values) and keeps no score matrix (Korthikanti et
            al., arXiv 2205.05198, selective recomputation); ``ops`` keeps what matmuls and
            attention give and redoes all other ops; ``full`` keeps the inputs of the group and
            runs its forward again; ``joined`` is redone together with the group before it, and
            keeps nothing: a layer of several groups that is redone as one is ``full`` and then
            ``joined``.
        offload: Whether the optimizer states are in the memory of the host, which takes the step
            (ZeRO-Offload, Ren et al., arXiv 2101.06840).
        slices: With ZeRO-3, into how many slices of rows the weights of matmuls are cut
            (`Work.weights`), each of which is gathered, used and given back before the next one:
            what is whole at a time is a slice, and the next one on its way (operator splitting,
            Jiang et al., OSDP, arXiv 2209.13258). Weights whose rows it does not divide stay whole.
    """

    layout: str = "replicate"
    zero: int = 0
    recompute: Recompute = "none"
    offload: bool = False
    slices: int = 1

    def cuts(self, weight: Weight) -> bool:
        """Whether a weight, as a device holds it, is gathered slice by slice."""
        return self.slices > 1 and weight.rows % self.slices == 0


@dataclass(frozen=True, slots=True)
class Stage:
    """Groups `start` to `stop` (exclusive) on one mesh, with one choice for each group.

    Args:
        start, stop: The groups.
        mesh: Where they run.
        choices: How each of them runs.
        shares: Samples of each replica of the mesh of one micro-batch; empty if they are equal.
    """

    start: int
    stop: int
    mesh: Mesh
    choices: tuple[GroupChoice, ...]
    shares: tuple[int, ...] = ()

    def samples(self, micro_batch: int) -> tuple[int, ...]:
        """Samples of each replica of a micro-batch of so many."""
        return self.shares or (micro_batch // self.mesh.dp,) * self.mesh.dp


ActionKind = Literal["F", "B", "W"]


@dataclass(frozen=True, slots=True, order=True)
class Action:
    """One step of a schedule, written ``0F0``: stage, kind, micro-batch.

    Args:
        stage: Index of the stage.
        kind: ``F`` is the forward. ``B`` is the whole backward; where the schedule has a ``W`` of
            the same stage and micro-batch, only the part that makes the gradients of the stage's
            inputs. ``W`` makes the gradients of its parameters (Qi et al., arXiv 2401.10241).
        micro_batch: Index of the micro-batch.
    """

    stage: int
    kind: ActionKind
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.micro_batch}"


@dataclass(frozen=True)
class Plan:
    """All that a run needs. Stages are in pipeline order; stage i feeds stage i + 1.

    Args:
        stages: Contiguous, together all groups of the graph.
        micro_batches: Number of micro-batches of a step; each has `global_batch / micro_batches`
            samples, cut over the dp replicas of each stage (`Stage.shares`).
        global_batch: Samples of a step.
        schedule: A name of `rlplace.plan.schedules.SCHEDULES`, or ``explicit`` for `orders`.
        graph: Fingerprint of the graph it was made for.
        cluster: Fingerprint of the cluster it was made for.
        precision, optimizer, attention, loss_chunks, fused: As in the instance.
        graph_name: Name of the graph, for people.
        source: How the library builds the model again (`OpGraph.source`).
        orders: With the schedule ``explicit``, the actions of each lane in the order in which it
            runs them (`rlplace.plan.schedules.lanes`); empty with any other.
    """

    stages: tuple[Stage, ...]
    micro_batches: int
    global_batch: int
    schedule: str = "1f1b"
    graph: str = ""
    cluster: str = ""
    precision: str = "fp32"
    optimizer: str = "adamw"
    attention: str = "flash"
    loss_chunks: int = 1
    fused: bool = False
    graph_name: str = ""
    source: dict[str, str | int | float | bool | None] = field(default_factory=dict)
    orders: tuple[tuple[Action, ...], ...] = ()

    @property
    def devices(self) -> tuple[int, ...]:
        """Global ranks that take part, sorted."""
        return tuple(sorted({d for stage in self.stages for d in stage.mesh.devices}))

    @property
    def micro_batch(self) -> int:
        """Samples of one micro-batch, over all replicas."""
        return self.global_batch // self.micro_batches

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON (see `rlplace.plan.files`)."""
        from rlplace.plan.files import save_plan

        save_plan(self, path)

    @staticmethod
    def load(path: str | Path) -> Plan:
        """Read a plan from JSON (see `rlplace.plan.files`)."""
        from rlplace.plan.files import load_plan

        return load_plan(path)
