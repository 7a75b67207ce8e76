"""The least that a group costs with one layout on one kind of device, for every split.

Only what any schedule, any place of the devices and any neighbours leave is claimed: collectives
run on the best links, and of host and device the slower one counts alone.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import numpy.typing as npt

from rlplace.cluster.types import DeviceKind
from rlplace.cost import memory
from rlplace.cost.compute import Compute, compute
from rlplace.graph.types import Layout
from rlplace.plan.types import GroupChoice, Mesh
from rlplace.simulate.bounds.frame import Frame, Tables, room
from rlplace.simulate.bounds.splits import Floats


@dataclass
class Least:
    """The least costs; arrays are (P,) unless they say otherwise.

    Args:
        frame: What all have in common.
        layout: The layout.
        index: Index of the kind.
        tied: Elements of tied parameters that memory does not count.
        choices: What may be redone and offloaded.
    """

    frame: Frame
    layout: Layout
    index: int
    tied: int
    choices: tuple[GroupChoice, ...]
    _held: dict[GroupChoice, Floats] = field(default_factory=dict)

    @property
    def kind(self) -> DeviceKind:
        """The kind itself."""
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
        """Seconds of passes (7, P), as `_pass` has them."""
        sizes = self.frame.cut.sizes.tolist()
        found = [self._pass(own, size) for own, size in zip(self._computed, sizes, strict=True)]
        passes: Floats = np.array(found).T[:, self.frame.cut.size]
        return passes

    def _pass(self, own: Compute | None, samples: float) -> tuple[float, ...]:
        """Forward, backward, the host in it, weights, light ops, attention, what redoing skips."""
        if own is None:
            return (np.inf, np.inf, 0.0, 0.0, 0.0, 0.0, 0.0)
        forward = max(own.forward + self._exchange("forward", samples), own.host_forward)
        backward = own.backward + self._exchange("backward", samples)
        light = max(own.light, own.host_forward)
        skipped = own.last if self.frame.instance.execution.early_stop else 0.0
        return forward, backward, own.host_backward, own.weight, light, own.attention, skipped

    def _exchange(self, phase: str, samples: float) -> float:
        """The layout's collectives; those that the backward pass runs again are not counted."""
        size, links = self.frame.instance.bytes.activation, self.frame.links
        beside = self.frame.exchange_overlap * (1.0 - 1.0 / self.layout.degree)
        return (
            (1.0 - beside)
            * self.frame.share
            * sum(
                links.seconds(own.kind, own.floats(samples) * size, self.layout.degree)
                for own in self.layout.collectives
                if own.phase == phase
            )
        )

    @cached_property
    def _traffic(self) -> Floats:
        """Seconds of a gather a pass, a scatter a micro-batch, a reduction, a publication (4, P).

        Without tensor parallelism, all devices of a mesh reduce together, and shard together where
        there are as many shards as replicas: then each of them has a part in it.
        """
        cut = self.frame.cut
        found = self._over(self.frame.tables)
        if self.layout.degree > 1 or len(self.frame.joint) == 1:
            return found
        together = (cut.zero == 0) | (cut.shards == cut.replicas)
        own: Floats = np.where(together, self._over(self.frame.joint[self.index]), found)
        return own

    def _over(self, tables: Tables) -> Floats:
        frame, size, work = self.frame, self.frame.instance.bytes, self.layout.work
        shards, zero = frame.cut.shards, frame.cut.zero
        gradients, weights = float(work.params * size.gradient), float(work.params * size.weight)
        frozen = float(work.frozen_params * size.weight)
        bucket = frame.instance.execution.bucket
        whole, scatter = (t.seconds(gradients, bucket) for t in (tables.whole, tables.scatter))
        across = tables.across.seconds(gradients / shards, bucket / shards)
        reduce = np.where(zero == 1, np.minimum(whole, scatter + across), across)
        lent = (weights + frozen) * (frame.instance.execution.gather_bytes or size.weight)
        gather = np.where(zero == 3, tables.gather.seconds(lent / size.weight), 0.0)
        publish = np.where((zero == 1) | (zero == 2), tables.gather.seconds(weights, bucket), 0.0)
        return np.array(
            [
                frame.share * gather,
                frame.share * np.where(zero >= 2, scatter, 0.0),
                frame.reduce_share * np.where(zero == 0, whole, reduce),
                frame.share * publish,
            ]
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
        forward, backward, host, _, light, attention, skipped = self._passes
        redo = {"none": 0.0, "attention": attention, "ops": light, "full": forward}
        gather, scatter, reduce, _ = self._traffic
        backward = np.maximum(backward + self._accumulated, host) + redo[choice.recompute]
        passes = self.forward + self._beside(backward, gather + scatter)
        if choice.recompute == "full":
            passes = np.maximum(0.0, passes - skipped)
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
        moved: int = self.layout.work.params * (2 * size.gradient + size.weight)
        local = moved / np.where(cut.zero >= 2, cut.shards, 1)
        return local / self._bandwidth * (1.0 - 1.0 / cut.count)

    def _optimizer(self, offload: bool) -> Floats:
        """Seconds of the optimizer step and of what is published after it."""
        instance, params = self.frame.instance, self.layout.work.params
        size = instance.bytes
        if offload:
            way = 2 * max(size.gradient, size.weight) / self.kind.host_bandwidth
            seconds = self.frame.share * way * params
        else:
            each = 2 * size.weight + size.gradient + 2 * instance.optimizer_bytes
            seconds = each * params / self._bandwidth
        found: Floats = self._traffic[3] + seconds / self.frame.cut.shards
        return found

    @property
    def _bandwidth(self) -> float:
        return self.kind.stream

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
