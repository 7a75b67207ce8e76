"""Every way to run a group, each with the least that it costs, as arrays.

A *way* is a layout on a kind of device, a split of the batch with a ZeRO level, and what is redone
and offloaded, of all that the instance lets a planner choose. Only what any schedule, any place of
the devices and any neighbours leave is claimed: collectives run on the best links, and of host and
device the slower one counts alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product

import numpy as np
import numpy.typing as npt

from rlplace.cluster.types import DeviceKind
from rlplace.cost import memory
from rlplace.cost.compute import Compute, compute
from rlplace.graph.types import Layout, Structure, Work
from rlplace.plan.types import GroupChoice, Instance, Mesh
from rlplace.simulate.bounds.links import BestLinks, Table
from rlplace.simulate.bounds.splits import Floats, Ints, Splits, splits

#: ZeRO levels.
_LEVELS = (0, 1, 2, 3)


@dataclass(frozen=True, slots=True)
class Ways:
    """The ways of a structure: O choices of recompute and offload, L layouts on kinds, P splits.

    Args:
        kind: Index of the kind (L,).
        devices: Devices of the mesh (L, P).
        step: Seconds of a device for a step, without what hides behind its backward (O, L, P).
        tail: Seconds of a device for all forwards, then all of its reduction (O, L, P).
        forward: Seconds of the forward of one micro-batch (L, P).
        through: The same, and of the part of the backward that the stage before waits for (L, P).
        held: Bytes that a device holds of states and of one micro-batch (O, L, P).
    """

    kind: Ints
    devices: Floats
    step: Floats
    tail: Floats
    forward: Floats
    through: Floats
    held: Floats


class Frame:
    """What the ways of all structures of an instance share.

    Args:
        instance: The question.
        tight: Whether memory may be short; if not, it is not looked at, nor what saves it.
    """

    def __init__(self, instance: Instance, *, tight: bool) -> None:
        cluster = instance.cluster
        self.instance, self.tight = instance, tight
        self.cut: Splits = splits(instance.global_batch, len(cluster.devices), instance.zero_levels)
        self.links = BestLinks(cluster)
        replicas, shards = self.cut.replicas, self.cut.shards
        self.whole: Table = self.links.table("all_reduce", replicas)
        self.across: Table = self.links.table("all_reduce", replicas // shards)
        self.scatter: Table = self.links.table("reduce_scatter", shards)
        self.gather: Table = self.links.table("all_gather", shards)
        overlap = max(kind.overlap for kind in cluster.kinds)
        self.gather_overlap = overlap * instance.execution.overlap_gather
        self.reduce_overlap = overlap * instance.execution.overlap_reduce
        cores = Counter((d.node, d.core) for d in cluster.devices if d.core is not None)
        #: Of the devices that share a core, the part of one in what they wait for together.
        self.share = 1.0 / max(cores.values(), default=1)
        #: The same of its reductions, which the others' compute may hide altogether.
        self.reduce_share = 1.0 if self.share == 1.0 else 0.0
        self.equal = max(Counter(device.kind for device in cluster.devices).values())

    @cached_property
    def states(self) -> tuple[Floats, Floats]:
        """Bytes of a trainable and of a frozen element, not offloaded and offloaded (2, P)."""
        found = []
        for offload in (False, True):
            # Each level keeps a part whole and shards the rest; two meshes tell them apart.
            one, two = (
                np.array([self._element(level, offload, shards) for level in _LEVELS]).T
                for shards in (1, 2)
            )
            whole, sharded = 2.0 * two - one, 2.0 * (one - two)
            found.append(whole[:, self.cut.zero] + sharded[:, self.cut.zero] / self.cut.shards)
        return found[0], found[1]

    def _element(self, level: int, offload: bool, shards: int) -> tuple[float, float]:
        choice = GroupChoice(zero=level, offload=offload)
        mesh = Mesh(tuple(range(shards)), dp_shard=shards)
        trainable, frozen = (
            memory.states(self.instance, work, choice, mesh).total
            for work in (Work(params=1), Work(frozen_params=1))
        )
        return trainable, frozen

    def ways(self, structure: Structure, tied: int) -> Ways:
        """The ways of a structure.

        Args:
            structure: What is run.
            tied: Elements of tied parameters among its own. They are not counted in memory, where
                several uses may be held once.
        """
        choices = tuple(self._choices(structure))
        least = [
            _Least(self, layout, index, tied, choices)
            for layout in self._layouts(structure)
            for index in range(len(self.instance.cluster.kinds))
        ]
        step, tail, held = (
            np.array([[getattr(own, name)(choice) for own in least] for choice in choices])
            for name in ("step", "tail", "held")
        )
        return Ways(
            kind=np.array([own.index for own in least], np.int64),
            devices=np.array([own.layout.degree * self.cut.replicas for own in least], float),
            step=step,
            tail=tail,
            forward=np.array([own.forward for own in least]),
            through=np.array([own.through for own in least]),
            held=held,
        )

    def _choices(self, structure: Structure) -> Iterator[GroupChoice]:
        """Recompute and offload; where memory is not looked at, only what costs no time."""
        modes = self.instance.recompute_options(structure.work)
        if "none" in modes and not self.tight:
            modes = ("none",)
        offload = self.instance.offered_offload if self.tight else (False,)
        for mode, away in product(modes, offload):
            yield GroupChoice(recompute=mode, offload=away)  # type: ignore[arg-type]  # a str

    def _layouts(self, structure: Structure) -> list[Layout]:
        """Layouts of the tp axis. Running whole on several devices is no better than on few."""
        offered = [degree for degree in self.instance.offered_tp if degree <= self.equal]
        return [
            Layout("replicate", min(offered, default=1), structure.work),
            *(
                layout
                for layout in (*structure.layouts, *structure.bordered)
                if layout.axis == "tp" and layout.degree in offered
            ),
        ]


def room(instance: Instance, kind: DeviceKind) -> float:
    """Bytes of a device that are left for a plan."""
    return kind.memory * (1.0 - instance.memory_margin) - kind.reserve


@dataclass
class _Least:
    """The least that a group costs with one layout on one kind of device; arrays are (P,)."""

    frame: Frame
    layout: Layout
    index: int
    tied: int
    choices: tuple[GroupChoice, ...]
    _held: dict[GroupChoice, Floats] = field(default_factory=dict)

    @property
    def kind(self) -> DeviceKind:
        return self.frame.instance.cluster.kinds[self.index]

    @cached_property
    def _computed(self) -> list[Compute | None]:
        """Compute of one micro-batch, by its samples (S,); None where it never fits."""
        work, instance, cut = self.layout.work, self.frame.instance, self.frame.cut
        fitting = np.any(list(self._fits.values()), axis=0)
        used = np.bincount(cut.size[fitting], minlength=len(cut.sizes)) > 0
        return [
            compute(instance, work, [self.kind], 1, samples) if own else None
            for samples, own in zip(cut.sizes.tolist(), used.tolist(), strict=True)
        ]

    @cached_property
    def _passes(self) -> Floats:
        """Seconds of forward, backward, the host in it, weights, light ops, attention (6, P)."""
        sizes = self.frame.cut.sizes.tolist()
        found = [self._pass(own, size) for own, size in zip(self._computed, sizes, strict=True)]
        passes: Floats = np.array(found).T[:, self.frame.cut.size]
        return passes

    def _pass(self, own: Compute | None, samples: float) -> tuple[float, ...]:
        if own is None:
            return (np.inf, np.inf, 0.0, 0.0, 0.0, 0.0)
        forward = max(own.forward + self._exchange("forward", samples), own.host_forward)
        backward = own.backward + self._exchange("backward", samples)
        light = max(own.light, own.host_forward)
        return forward, backward, own.host_backward, own.weight, light, own.attention

    def _exchange(self, phase: str, samples: float) -> float:
        """The layout's collectives; those that the backward pass runs again are not counted."""
        size, links = self.frame.instance.bytes.activation, self.frame.links
        return self.frame.share * sum(
            links.seconds(own.kind, own.floats(samples) * size, self.layout.degree)
            for own in self.layout.collectives
            if own.phase == phase
        )

    @cached_property
    def _traffic(self) -> tuple[Floats, Floats, Floats, Floats]:
        """Seconds of a gather a pass, a scatter a micro-batch, a reduction and a publication."""
        frame, size, work = self.frame, self.frame.instance.bytes, self.layout.work
        shards, zero = frame.cut.shards, frame.cut.zero
        gradients, weights = float(work.params * size.gradient), float(work.params * size.weight)
        frozen = float(work.frozen_params * size.weight)
        whole, across = frame.whole.seconds(gradients), frame.across.seconds(gradients / shards)
        scatter = frame.scatter.seconds(gradients)
        reduce = np.where(zero == 1, np.minimum(whole, scatter + across), across)
        gather = np.where(zero == 3, frame.gather.seconds(weights + frozen), 0.0)
        publish = np.where((zero == 1) | (zero == 2), frame.gather.seconds(weights), 0.0)
        return (
            frame.share * gather,
            frame.share * np.where(zero >= 2, scatter, 0.0),
            frame.reduce_share * np.where(zero == 0, whole, reduce),
            frame.share * publish,
        )

    @cached_property
    def forward(self) -> Floats:
        """Seconds of the forward of a micro-batch."""
        return self._beside(self._passes[0], self._traffic[0])

    @cached_property
    def through(self) -> Floats:
        """Seconds of its forward and of its backward without the gradients of parameters."""
        _, backward, host, weight, *_ = self._passes
        gather, scatter, *_ = self._traffic
        whole = self._beside(np.maximum(backward, host), gather + scatter)
        found: Floats = self.forward + np.maximum(0.0, whole - np.minimum(weight, whole))
        return found

    def step(self, choice: GroupChoice) -> Floats:
        """Seconds of all micro-batches, of the reduction that cannot hide, of the optimizer."""
        forward, backward, host, _, light, attention = self._passes
        redo = {"none": 0.0, "attention": attention, "ops": light, "full": forward}
        gather, scatter, reduce, _ = self._traffic
        backward = np.maximum(backward + self._accumulated, host) + redo[choice.recompute]
        passes = self.forward + self._beside(backward, gather + scatter)
        late = (1.0 - self.frame.reduce_overlap) * reduce
        spent = self.frame.cut.count * passes + late + self._optimizer(choice.offload)
        return np.where(self._fits[choice], spent, np.inf)

    def tail(self, choice: GroupChoice) -> Floats:
        """Seconds of all forwards, of the whole reduction, of the optimizer."""
        spent = self.frame.cut.count * self.forward + self._traffic[2]
        return np.where(self._fits[choice], spent + self._optimizer(choice.offload), np.inf)

    def _beside(self, passes: Floats, traffic: Floats) -> Floats:
        """Compute and the traffic of states: the longer, and the share that does not overlap."""
        both = np.minimum(passes, traffic)
        found: Floats = np.maximum(passes, traffic) + (1.0 - self.frame.gather_overlap) * both
        return found

    @cached_property
    def _accumulated(self) -> Floats:
        """Seconds in which a micro-batch's gradients are added to those before."""
        size, cut = self.frame.instance.bytes, self.frame.cut
        moved = self.layout.work.params * (2 * size.gradient + size.weight)
        local = moved / np.where(cut.zero >= 2, cut.shards, 1)
        return local / self._bandwidth * (1.0 - 1.0 / cut.count)

    def _optimizer(self, offload: bool) -> Floats:
        """Seconds of the optimizer step and of what is published after it."""
        instance, publish = self.frame.instance, self._traffic[3]
        size, local = instance.bytes, self.layout.work.params / self.frame.cut.shards
        if not offload:
            each = 2 * size.weight + size.gradient + 2 * instance.optimizer_bytes
            return publish + local * each / self._bandwidth
        way = 2 * max(size.gradient, size.weight) / self.kind.host_bandwidth
        return publish + self.frame.share * way * local

    @property
    def _bandwidth(self) -> float:
        return self.kind.bandwidth * self.kind.memory_efficiency

    def held(self, choice: GroupChoice) -> Floats:
        """Bytes of states and of what is kept of a micro-batch; the group's inputs do not count."""
        if choice not in self._held:
            self._held[choice] = self._hold(choice)
        return self._held[choice]

    def _hold(self, choice: GroupChoice) -> Floats:
        cut = self.frame.cut
        if not self.frame.tight:
            return np.zeros(len(cut.count))
        kept = [
            memory.saved(self.frame.instance, self.layout, choice, samples, 0.0)
            for samples in cut.sizes.tolist()
        ]
        held: Floats = self._states(choice.offload) + np.array(kept)[cut.size]
        return held

    @cached_property
    def _fits(self) -> dict[GroupChoice, npt.NDArray[np.bool_]]:
        """Whether a device has room for states and all that one micro-batch needs, by choice."""
        cut, limit = self.frame.cut, room(self.frame.instance, self.kind)
        if not self.frame.tight:
            return dict.fromkeys(self.choices, np.ones(len(cut.count), np.bool_))
        found = {}
        for choice in self.choices:
            passing = [
                memory.transient(self.frame.instance, self.layout, choice, Mesh((0,)), samples)
                for samples in cut.sizes.tolist()
            ]
            found[choice] = self.held(choice) + np.array(passing)[cut.size] <= limit
        return found

    def _states(self, offload: bool) -> Floats:
        """Bytes of parameters, gradients and optimizer states."""
        own, each = self.layout.work, self.frame.states[offload]
        held: Floats = max(0, own.params - self.tied) * each[0] + own.frozen_params * each[1]
        return held
