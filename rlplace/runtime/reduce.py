"""Gradients summed over replicas while backward runs, whatever ZeRO level each parameter has.

What is summed once a step starts when its last gradient is complete; what is scattered after every
backward likewise. Both have an order of their own that is the same on every rank.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import nn

from rlplace.runtime.buckets import Bucket, Holding, Replicas, ScatteredBucket, ShardedBucket
from rlplace.runtime.clip import clip
from rlplace.runtime.cuts import BUCKET_BYTES, Trained, cut
from rlplace.runtime.flat import LentWeights, WholeWeights, size_of
from rlplace.runtime.lending import Lender
from rlplace.runtime.precision import dtypes_for
from rlplace.runtime.stepped import Run
from rlplace.runtime.ties import Exchange, Tied

#: All of a backward, only what its inputs need, or only what its parameters need.
Phase = Literal["all", "inputs", "weights"]


class Reducer:
    """Sums the gradients of one rank's parameters over its replicas.

    Args:
        params: The parameters, in the order in which backward completes their gradients; frozen
            ones too, as far as they are cut (ZeRO-3).
        groups: The replicas.
        tied: Parameters that other meshes hold too; they are among `params`.
        steps: Number of steps (regions) of each stage.
        precision: Name of the precision.
        overlap: Start buckets during backward; otherwise all at the end.
        bucket_bytes: Size of a bucket.
        everyone: Process group of all ranks of the plan; None where there is one.
    """

    def __init__(
        self,
        params: Sequence[Trained],
        groups: Replicas,
        tied: Iterable[Tied] = (),
        *,
        steps: Mapping[int, int] | None = None,
        precision: str = "fp32",
        overlap: bool = True,
        bucket_bytes: int = BUCKET_BYTES,
        everyone: Any = None,
    ) -> None:
        self._groups, self._precision, self._overlap = groups, precision, overlap
        self._everyone, self._traffic = everyone, Counter[str]()
        shared = {id(one.param): one for one in tied}
        self._members: list[tuple[tuple[Trained, ...], Bucket | ScatteredBucket]] = []
        self._lent: list[tuple[tuple[Trained, ...], LentWeights]] = []
        for run in cut(params, bucket_bytes, set(shared), groups.shards is not None):
            self._add(run)
        self._owner = {id(one.param): bucket for run, bucket in self._members for one in run}
        self._tied = [(one, self._owner[key]) for key, one in shared.items()]
        alone = {id(bucket) for _, bucket in self._tied}
        self._summed = [b for _, b in self._members if id(b) not in alone]
        self._buckets = [b for b in self._summed if isinstance(b, Bucket)]
        stages = sorted({stage for one in params for stage in one.stages} | set(steps or ()))
        counts = {stage: (steps or {}).get(stage, 1) for stage in stages}
        self._by_step = {stage: self._scattered(stage, counts[stage]) for stage in stages}
        self._queues = {
            stage: [bucket for _, buckets in by_step for bucket in buckets]
            for stage, by_step in self._by_step.items()
        }
        self.lenders = {stage: Lender(self._needs(stage, counts[stage])) for stage in stages}
        for one in (one for run, _ in self._members for one in run):
            hook = one.param.register_post_accumulate_grad_hook
            hook(self._ready)  # type: ignore[no-untyped-call]  # torch has no types for it
        self._stage, self._scatters = 0, False
        self._final: Collection[int] = ()
        self._queue: list[ScatteredBucket] = []
        self._missing: dict[int, set[int]] = {}
        self._waits: dict[int, set[tuple[int, int]]] = {}
        self._flying: ScatteredBucket | None = None
        self._next = 0

    @property
    def trained(self) -> list[nn.Parameter]:
        """What the optimizer of this rank steps."""
        return [param for _, bucket in self._members for param in bucket.stepped.params]

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The same as groups of equal settings (`Trained.settings`)."""
        found: dict[tuple[tuple[str, Any], ...], list[nn.Parameter]] = {}
        for run, bucket in self._members:
            found.setdefault(run[0].settings, []).extend(bucket.stepped.params)
        return [{"params": params, **dict(settings)} for settings, params in found.items()]

    @property
    def runs(self) -> list[Run]:
        """What `trained` is made of."""
        return [run for _, bucket in self._members for run in bucket.stepped.runs]

    @property
    def lent(self) -> list[LentWeights]:
        """Weights of which this rank keeps a part, frozen ones among them."""
        return [weights for _, weights in self._lent]

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights that this rank holds beside the parameters themselves."""
        return sum(size_of(weights.own) for weights in self.lent)

    @property
    def gradient_bytes(self) -> int:
        """Bytes of all gradients that this rank holds."""
        return sum(bucket.gradient_bytes for _, bucket in self._members)

    @property
    def copy_bytes(self) -> int:
        """Bytes of the copies on the device that the optimizer steps in place of weights."""
        return sum(bucket.stepped.bytes for _, bucket in self._members)

    @property
    def lent_peak(self) -> int:
        """Largest number of bytes of weights that were gathered at a time."""
        return max((lender.peak for lender in self.lenders.values()), default=0)

    @property
    def on_host(self) -> set[int]:
        """Ids of what is stepped in the memory of the host."""
        kept = [bucket.stepped for _, bucket in self._members if bucket.stepped.host]
        return {id(param) for stepped in kept for param in stepped.params}

    @property
    def traffic(self) -> Counter[str]:
        """Bytes given to each collective so far."""
        found, weights = Counter(self._traffic), {id(own): own for own in self._weights()}
        for _, bucket in self._members:
            found += bucket.traffic
        for own in weights.values():
            found += own.traffic
        return found

    def start(self) -> None:
        """Zero the gradients for a new step."""
        for weights in self.lent:
            weights.release()
        for _, bucket in self._members:
            bucket.start()
        self._waits = {
            id(bucket): {(stage, id(one.param)) for one in run for stage in one.stages}
            for run, bucket in self._members
        }
        self._next = 0

    @contextlib.contextmanager
    def backward(
        self, stage: int, final: Collection[int] = (), phase: Phase = "all"
    ) -> Iterator[None]:
        """Around the backward of a micro-batch on one stage.

        Where the schedule splits it, gradients are scattered at the end of ``weights``.

        Args:
            stage: The stage.
            final: Ids of the parameters that get no other gradient of this stage after this.
            phase: Which part of the backward.
        """
        self._stage, self._final, self._scatters = stage, final, phase != "inputs"
        self._queue = list(self._queues[stage])
        self._missing = {id(b): {id(p) for p in b.params} for b in self._queue}
        if phase != "weights":
            self.lenders[stage].begin_backward()
        yield
        if phase != "weights":
            self.lenders[stage].end_backward()
        while self._queue and self._scatters:
            self._scatter()
        self._is_final(stage, final)
        self._final = ()

    def idle_forward(self, stage: int) -> None:
        """In place of a stage's forward on a replica whose micro-batch has no samples.

        The other replicas gather weights, and need this rank's part.
        """
        self.lenders[stage].idle()

    def idle_backward(self, stage: int, final: Collection[int] = (), phase: Phase = "all") -> None:
        """In place of a stage's backward on such a replica: it scatters zeros with the others.

        They may wait for a scatter before they gather the next weights, or gather all weights
        before they scatter anything; so this rank waits for gathers only, until all is started.
        """
        self._collect()
        lender, started = self.lenders[stage], []
        if phase != "weights":
            lender.begin_backward()
        for step, buckets in self._by_step[stage]:
            if phase != "weights":
                lender.back(step)
            for bucket in buckets if phase != "inputs" else ():
                bucket.scatter()
                started.append(bucket)
        if phase != "weights":
            lender.end_backward()
        for bucket in started:
            bucket.collect()
        self._is_final(stage, final)

    def finish(self) -> None:
        """Reduce what has not been, and wait for all of it."""
        self._collect()
        while self._next < len(self._buckets):
            self._launch()
        for bucket in self._summed:
            if isinstance(bucket, ScatteredBucket):
                bucket.launch()
        exchanges = [Exchange(one, bucket) for one, bucket in self._tied]
        for bucket in self._summed:
            bucket.settle()
        for exchange in exchanges:
            self._traffic["all_reduce"] += exchange.bytes
            exchange.settle()

    def clip(self, max_norm: float) -> float:
        """Scale all gradients so that their global 2-norm is at most `max_norm`.

        Every rank of the plan calls this, after `finish`.

        Returns:
            The norm before, as `torch.nn.utils.clip_grad_norm_` of one process gives it.
        """
        counted = {id(one.param) for run, _ in self._members for one in run if one.counted}
        own: list[torch.Tensor] = []
        every: list[torch.Tensor] = []
        for run, bucket in self._members:
            copies = self._groups.every if self._level(run) == 0 else self._groups.replicate
            first = copies is None or torch.distributed.get_rank(copies) == 0
            gradients = dict(
                zip(map(id, bucket.stepped.params), bucket.stepped.gradients, strict=True)
            )
            every += bucket.stepped.gradients
            own += [
                span.of(gradients[id(span.stepped)])
                for span in bucket.stepped.runs
                if first and id(span.param) in counted
            ]
        return clip(own, every, max_norm, self._everyone)

    def update(self, optimizer: torch.optim.Optimizer) -> None:
        """Step, and give every replica what this rank alone has stepped."""
        for _, bucket in self._members:
            bucket.stepped.take_gradients()
        optimizer.step()
        self.publish()

    def publish(self) -> None:
        """Bring the weights of every replica up to date with what their ranks stepped."""
        for _, bucket in self._members:
            bucket.publish()

    def refresh(self) -> None:
        """After `runs` were written into: make all that is made of them agree. All ranks call it.

        A parameter that several meshes hold is among the runs of each. Frozen parameters are not
        among the runs; those of ZeRO-3 are written between `complete` and `keep_frozen`.
        """
        self.publish()

    def complete(self) -> None:
        """Make weights and gradients whole on every rank, so that they can be looked at.

        All ranks call it; it lasts until the next step.
        """
        for _, bucket in self._members:
            bucket.complete()
        for weights in self.lent:
            weights.complete()

    def keep_frozen(self) -> None:
        """Take over frozen parameters that were written into after `complete`."""
        trained = {id(run[0].param) for run, _ in self._members}
        for run, weights in self._lent:
            if id(run[0].param) not in trained:
                weights.keep()

    def _weights(self) -> list[WholeWeights | LentWeights]:
        cut = [b for _, b in self._members if isinstance(b, ShardedBucket | ScatteredBucket)]
        return [*self.lent, *(bucket.weights for bucket in cut)]

    def _level(self, run: Sequence[Trained]) -> int:
        return run[0].zero if self._groups.shards is not None else 0

    def _add(self, run: Sequence[Trained]) -> None:
        """Make the bucket of some parameters; frozen ones have no gradients."""
        params, first, groups = [one.param for one in run], run[0], self._groups
        types = dtypes_for(self._precision, first.param.dtype)
        holding = Holding(types.gradient, types.master, first.offload)
        level = self._level(run)
        if level == 3:
            lent = LentWeights(params, groups.shards, groups.gathers)
            self._lent.append((tuple(run), lent))
            if first.param.requires_grad:
                self._members.append((tuple(run), ScatteredBucket(lent, groups, holding)))
        elif level == 2:
            whole = WholeWeights(params, groups.shards)
            self._members.append((tuple(run), ScatteredBucket(whole, groups, holding)))
        elif level == 1:
            self._members.append((tuple(run), ShardedBucket(params, groups, holding)))
        else:
            self._members.append((tuple(run), Bucket(params, groups.every, holding)))

    def _scattered(self, stage: int, steps: int) -> list[tuple[int, list[ScatteredBucket]]]:
        """What a backward of a stage scatters after each step, from the last step to the first.

        A bucket is complete after the first step that uses it.
        """
        found: dict[int, list[ScatteredBucket]] = {step: [] for step in reversed(range(steps))}
        for run, bucket in self._members:
            if isinstance(bucket, ScatteredBucket) and stage in run[0].stages:
                first = min(step for one in run for own, step in one.uses if own == stage)
                found[first].append(bucket)
        return list(found.items())

    def _needs(self, stage: int, steps: int) -> list[list[LentWeights]]:
        found: list[list[LentWeights]] = [[] for _ in range(steps)]
        for run, weights in self._lent:
            for step in (step for own, step in run[0].uses if own == stage):
                found[step].append(weights)
        return found

    def _ready(self, param: torch.Tensor) -> None:
        bucket = self._owner[id(param)]
        bucket.take(param)
        if isinstance(bucket, ScatteredBucket):
            self._missing[id(bucket)].discard(id(param))
            while (
                self._scatters
                and self._overlap
                and self._queue
                and not self._missing[id(self._queue[0])]
            ):
                self._scatter()
        elif id(param) in self._final:
            self._waits[id(bucket)].discard((self._stage, id(param)))
            self._pump()

    def _is_final(self, stage: int, params: Collection[int]) -> None:
        """No gradient of these parameters comes from this stage any more."""
        done = {(stage, key) for key in params}
        if done:
            self._waits = {bucket: waits - done for bucket, waits in self._waits.items()}
        self._pump()

    def _pump(self) -> None:
        """Launch the buckets whose turn it is and that are complete."""
        while (
            self._overlap
            and self._next < len(self._buckets)
            and not self._waits[id(self._buckets[self._next])]
        ):
            self._launch()

    def _launch(self) -> None:
        self._buckets[self._next].launch()
        self._next += 1

    def _scatter(self) -> None:
        """Scatter the next bucket; one at a time, so that few gradients are whole at a time."""
        self._collect()
        self._flying = self._queue.pop(0)
        self._flying.scatter()
        if not self._overlap:
            self._collect()

    def _collect(self) -> None:
        if self._flying is not None:
            self._flying.collect()
            self._flying = None
