"""Every way to run a group, each with the least that it costs, as arrays.

A *way* is a layout on a kind of device, a split of the batch with a ZeRO level, and whether
activations are redone and optimizer states are on the host. Only what any schedule, any place of
the devices and any neighbours leave is claimed: collectives run on the best links, and of host and
device the slower one counts alone.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from itertools import product

import numpy as np

from rlplace.cluster.types import DeviceKind
from rlplace.cost import memory
from rlplace.cost.compute import compute
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
        self.cut: Splits = splits(instance.global_batch, len(cluster.devices))
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
        least = [
            _Least(self, layout, index, tied)
            for layout in self._layouts(structure)
            for index in range(len(self.instance.cluster.kinds))
        ]
        saving = list(product((False, True), repeat=2)) if self.tight else [(False, False)]
        step, tail, held = (
            np.array([[getattr(own, name)(*choice) for own in least] for choice in saving])
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

    def _layouts(self, structure: Structure) -> list[Layout]:
        """Layouts of the tp axis; running whole on several devices is no better than on one."""
        return [
            Layout("replicate", 1, structure.work),
            *(
                layout
                for layout in (*structure.layouts, *structure.bordered)
                if layout.axis == "tp" and layout.degree <= self.equal
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

    @property
    def kind(self) -> DeviceKind:
        return self.frame.instance.cluster.kinds[self.index]

    @cached_property
    def _passes(self) -> Floats:
        """Forward, backward, that of the host, recompute, the parameters' part (5, P)."""
        fits = self._activations.min(axis=0) <= room(self.frame.instance, self.kind)
        found = [
            self._pass(size) if fit else (np.inf, np.inf, 0.0, np.inf, 0.0)
            for size, fit in zip(self.frame.cut.sizes.tolist(), fits, strict=True)
        ]
        return np.array(found).T[:, self.frame.cut.size]

    def _pass(self, samples: float) -> tuple[float, ...]:
        instance = self.frame.instance
        own = compute(instance, self.layout.work, [self.kind], 1, samples)
        forward = max(own.forward + self._exchange("forward", samples), own.host_forward)
        backward = own.backward + self._exchange("backward", samples)
        redo = min(forward, max(own.light, own.host_forward))
        if instance.attention == "math" and own.attention:
            redo = min(redo, own.attention)
        return forward, backward, own.host_backward, redo, own.weight

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
        _, backward, host, _, weight = self._passes
        gather, scatter, *_ = self._traffic
        whole = self._beside(np.maximum(backward, host), gather + scatter)
        found: Floats = self.forward + np.maximum(0.0, whole - np.minimum(weight, whole))
        return found

    def step(self, redone: bool, offload: bool) -> Floats:
        """Seconds of all micro-batches, of the reduction that cannot hide, of the optimizer."""
        _, backward, host, redo, _ = self._passes
        gather, scatter, reduce, _ = self._traffic
        backward = np.maximum(backward + self._accumulated, host) + (redo if redone else 0.0)
        passes = self.forward + self._beside(backward, gather + scatter)
        late = (1.0 - self.frame.reduce_overlap) * reduce
        spent = self.frame.cut.count * passes + late + self._optimizer(offload)
        return np.where(self._allowed(redone, offload), spent, np.inf)

    def tail(self, redone: bool, offload: bool) -> Floats:
        """Seconds of all forwards, of the whole reduction, of the optimizer."""
        spent = self.frame.cut.count * self.forward + self._traffic[2] + self._optimizer(offload)
        return np.where(self._allowed(redone, offload), spent, np.inf)

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
        if not self.kind.host_bandwidth:
            return np.full_like(publish, np.inf)
        way = 2 * max(size.gradient, size.weight) / self.kind.host_bandwidth
        return publish + self.frame.share * way * local

    @property
    def _bandwidth(self) -> float:
        return self.kind.bandwidth * self.kind.memory_efficiency

    def held(self, redone: bool, offload: bool) -> Floats:
        """Bytes of states, and of activations if they are not redone."""
        if not self.frame.tight:
            return np.zeros(len(self.frame.cut.count))
        kept = 0.0 if redone else self._saved[self.frame.cut.size]
        return self._states(offload) + kept

    def _allowed(self, redone: bool, offload: bool) -> Floats | bool:
        """Whether states and what one micro-batch needs fit on a device."""
        if not self.frame.tight:
            return True
        needed = self._activations[int(redone)][self.frame.cut.size]
        fits: Floats = self._states(offload) + needed <= room(self.frame.instance, self.kind)
        return fits

    def _states(self, offload: bool) -> Floats:
        """Bytes of parameters, gradients and optimizer states."""
        own, each = self.layout.work, self.frame.states[offload]
        return max(0, own.params - self.tied) * each[0] + own.frozen_params * each[1]

    @cached_property
    def _saved(self) -> Floats:
        """Bytes that autograd keeps of one micro-batch, by its samples (S,)."""
        sizes, instance = self.frame.cut.sizes.tolist(), self.frame.instance
        kept = [memory.saved(instance, self.layout, GroupChoice(), s, 0.0) for s in sizes]
        return np.array(kept)

    @cached_property
    def _activations(self) -> Floats:
        """Bytes of activations and working sets, as autograd keeps them or redone (2, S)."""
        sizes, instance = self.frame.cut.sizes.tolist(), self.frame.instance
        if not self.frame.tight:
            return np.zeros((2, len(sizes)))
        one = Mesh((0,))
        choices = GroupChoice(), GroupChoice(recompute="full")
        alone, redone = (
            np.array([memory.transient(instance, self.layout, own, one, s) for s in sizes])
            for own in choices
        )
        # Where only the attention is redone, what the rest saves stays, but the scores may not.
        least = alone if instance.attention == "math" else redone
        return np.array([self._saved + alone, least])
