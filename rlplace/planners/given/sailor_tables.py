"""Tables of Sailor's rule for one micro-batch and number of replicas, as the sweep reads them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import combinations, combinations_with_replacement, product

import numpy as np
from numpy.typing import NDArray

from rlplace.cost.given.sailor import (
    FLOAT,
    Replica,
    gradient_bytes,
    reduction_seconds,
    replica_bytes,
    transfer_seconds,
)
from rlplace.cost.given.sailor_form import SailorInstance, SailorPlan, SailorStage
from rlplace.planners.given.sailor_sweep import Floats, Ints, SweepTables

#: The replicas that a stage has, each kind and tp once: their numbers are chosen at the end.
Type = tuple[Replica, ...]


@dataclass
class SailorTables:
    """Makes tables, and keeps what several of them share.

    Args:
        instance: The problem.
    """

    instance: SailorInstance
    _ranges: dict[tuple[Replica, int], Floats] = field(default_factory=dict)
    _lowest: dict[tuple[Replica, int], Ints] = field(default_factory=dict)
    _sent: dict[tuple[Replica, Replica, int], Floats] = field(default_factory=dict)
    _reductions: dict[tuple[frozenset[str], int, int], Floats] = field(default_factory=dict)

    @property
    def layers(self) -> int:
        """Layers of the model."""
        return len(self.instance.model.outputs)

    @cached_property
    def micro_batches(self) -> tuple[int, ...]:
        """Micro-batches that were profiled on a kind of the cluster."""
        known = {batch for kind, batch, _ in self.instance.model.times if kind in self.kinds}
        return tuple(sorted(known))

    @cached_property
    def kinds(self) -> tuple[str, ...]:
        """Kinds of the cluster."""
        return tuple(sorted(self.instance.counts))

    def replicas(self, micro_batch: int) -> tuple[Replica, ...]:
        """What a replica may be: profiled, and such that nodes are filled without a remainder."""
        model = self.instance.model
        found: list[Replica] = []
        for kind in self.kinds:
            sizes = [size for name, size in self.instance.nodes if name == kind]
            profiled = {tp for k, b, tp in model.times if (k, b) == (kind, micro_batch)}
            for tp in sorted(profiled & set(model.params), reverse=True):
                sizes = [tp] if (whole := all(size % tp == 0 for size in sizes)) else sizes
                found += [(kind, tp)] if whole else []
        return tuple(sorted(found))

    def mixtures(self, micro_batch: int) -> Iterator[Type]:
        """No mixed stage, and each that has several kinds with one tp of each."""
        yield ()
        offered = self.replicas(micro_batch)
        by_kind = [[replica for replica in offered if replica[0] == kind] for kind in self.kinds]
        for count in range(2, len(by_kind) + 1):
            for chosen in combinations(by_kind, count):
                yield from product(*chosen)

    def types(self, micro_batch: int, mixture: Type) -> tuple[Type, ...]:
        """The types of stages of a plan: of one kind and tp, and the mixture."""
        pure: tuple[Type, ...] = tuple((replica,) for replica in self.replicas(micro_batch))
        return (*pure, mixture) if mixture else pure

    def make(self, micro_batch: int, replicas: int, mixture: Type) -> SweepTables:
        """The tables of plans in which exactly one stage is `mixture`, or none where it is empty.

        Args:
            micro_batch: Samples.
            replicas: Replicas of every stage.
            mixture: See `mixtures`.
        """
        types = self.types(micro_batch, mixture)
        send, hop = self._hops(types, micro_batch)
        lowest = [[self._fits(r, micro_batch) for r in members] for members in types]
        after, first, whole, left = self._used(types, replicas, mixture)
        pools = [self.kinds.index(of[0][0]) if len(of) == 1 else len(self.kinds) for of in types]
        return SweepTables(
            compute=np.stack(
                [np.max([self._range(r, micro_batch) for r in of], axis=0) for of in types]
            ),
            reduction=np.stack([self._reduction(of, replicas) for of in types]),
            send=send,
            hop=hop,
            lowest=np.stack([np.max(of, axis=0) for of in lowest], axis=1),
            after=after,
            first=first,
            whole=whole,
            left=left,
            pools=np.array(pools),
        )

    def plan(
        self,
        micro_batch: int,
        replicas: int,
        mixture: Type,
        stages: tuple[tuple[int, int, int], ...],
    ) -> SailorPlan:
        """The plan of (type, start, stop) of each stage; the mixture has what the others leave."""
        types = self.types(micro_batch, mixture)
        chosen = [types[kind] for kind, _, _ in stages]
        free = dict(self.instance.counts)
        for members in chosen:
            if len(members) == 1:
                free[members[0][0]] -= replicas * members[0][1]
        shares = self._shares(mixture, free, replicas)
        filled = [
            tuple(r for r, n in zip(of, shares, strict=True) for _ in range(n))
            if len(of) > 1
            else of * replicas
            for of in chosen
        ]
        return SailorPlan(
            micro_batch,
            tuple(
                SailorStage(start, stop, members)
                for (_, start, stop), members in zip(stages, filled, strict=True)
            ),
        )

    def _range(self, replica: Replica, micro_batch: int) -> Floats:
        key = (replica, micro_batch)
        if key not in self._ranges:
            kind, tp = replica
            self._ranges[key] = _ranges(self.instance.model.times[kind, micro_batch, tp])
        return self._ranges[key]

    def _fits(self, replica: Replica, micro_batch: int) -> Ints:
        """[K, L + 1] first layer of the longest stage that ends there, k of them in flight."""
        key = (replica, micro_batch)
        if key not in self._lowest:
            layers = self.layers
            limit = self.instance.memory[replica[0]]
            found = np.zeros((layers + 1, layers + 1), np.int64)
            for flying in range(1, layers + 1):
                start = 0
                for stop in range(1, layers + 1):
                    samples = micro_batch * flying
                    while (
                        start < stop
                        and replica_bytes(self.instance, replica, start, stop, samples) > limit
                    ):
                        start += 1
                    found[flying, stop] = start
            self._lowest[key] = found
        return self._lowest[key]

    def _reduction(self, members: Type, replicas: int) -> Floats:
        kinds, tp = frozenset(kind for kind, _ in members), min(tp for _, tp in members)
        key = (kinds, tp, replicas)
        if key not in self._reductions:
            layers = self.layers
            sizes = np.array(
                [
                    [gradient_bytes(self.instance, a, b, tp) for b in range(layers + 1)]
                    for a in range(layers + 1)
                ]
            )
            distinct, where = np.unique(sizes, return_inverse=True)
            pairs = tuple(combinations_with_replacement(sorted(kinds), 2))
            seconds = [
                max(reduction_seconds(self.instance, pair, replicas, size) for pair in pairs)
                for size in distinct.tolist()
            ]
            self._reductions[key] = np.array(seconds)[where].reshape(sizes.shape)
        return self._reductions[key]

    def _hops(self, types: tuple[Type, ...], micro_batch: int) -> tuple[Floats, Ints]:
        """Seconds of the distinct hops by layer, and which of them is from a type to a type."""
        slowest = [
            np.max([self._hop(a, b, micro_batch) for a in source for b in target], axis=0)
            for source, target in product(types, repeat=2)
        ]
        rows, hop = np.unique(np.stack(slowest), axis=0, return_inverse=True)
        return rows, hop.reshape(len(types), len(types))

    def _hop(self, source: Replica, target: Replica, micro_batch: int) -> Floats:
        """[L] seconds to send the output of each layer."""
        key = (source, target, micro_batch)
        if key not in self._sent:
            sizes = [floats * FLOAT * micro_batch for floats in self.instance.model.outputs]
            seconds = {s: transfer_seconds(self.instance, source, target, s) for s in set(sizes)}
            self._sent[key] = np.array([seconds[size] for size in sizes])
        return self._sent[key]

    def _used(
        self, types: tuple[Type, ...], replicas: int, mixture: Type
    ) -> tuple[Ints, Ints, NDArray[np.bool_], Floats]:
        """`after`, `first`, `whole` and `left` of the tables.

        A set of used devices is (whether the mixture is there, then for each kind the devices of
        pure stages over the number of replicas), the last one counted fastest.
        """
        counts = np.array([self.instance.counts[kind] for kind in self.kinds])
        most = counts // replicas
        shape = (2 if mixture else 1, *(most + 1))
        sets = np.indices(shape).reshape(len(shape), -1)
        strides = np.array([int(np.prod(shape[at + 1 :])) for at in range(len(shape))])
        legal = self._legal(mixture, counts[:, None] - replicas * sets[1:], replicas)
        after = np.full((len(legal), len(types)), -1, np.int64)
        left = np.zeros(after.shape)
        for column, members in enumerate(types):
            kind, tp = members[0]
            mixed = len(members) > 1
            row, step = (0, 1) if mixed else (1 + self.kinds.index(kind), tp)
            left[:, column] = (
                1 - sets[0] if mixed else (counts[row - 1] / replicas - sets[row]) / tp
            )
            start = np.flatnonzero(sets[row] + step < shape[row])
            start = start[legal[start + step * strides[row]]]
            after[start, column] = start + step * strides[row]
        return after, after[0], (sets[0] == bool(mixture)) & legal, left

    def _legal(self, mixture: Type, free: Ints, replicas: int) -> NDArray[np.bool_]:
        """[F] whether a mixture can be made of the [kinds, F] devices that are not pure stages'."""
        enough = np.all(free >= 0, axis=0)
        if mixture:
            most = np.stack([free[self.kinds.index(kind)] // tp for kind, tp in mixture])
            enough &= np.all(most >= 1, axis=0) & (most.sum(axis=0) >= replicas)
        return np.asarray(enough)

    def _shares(self, mixture: Type, free: Mapping[str, int], replicas: int) -> tuple[int, ...]:
        """Replicas of each member of a mixture that can be made."""
        shares: list[int] = []
        for kind, tp in mixture:
            later = len(mixture) - len(shares) - 1
            shares.append(min(free[kind] // tp, replicas - sum(shares) - later))
        return tuple(shares)


def _ranges(values: tuple[float, ...]) -> Floats:
    """[L + 1, L + 1] sums over [start, stop)."""
    running = np.concatenate(([0.0], np.cumsum(values)))
    sums: Floats = running[None, :] - running[:, None]
    return sums
