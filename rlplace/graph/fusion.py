"""Memory-bound ops as a compiler would fuse them: what the kernels then read and write.

After TorchInductor (Ansel et al., ASPLOS 2024): ops that do no matmul-like work join the kernel of
an op whose result they read, as long as the kernels stay free of cycles and a kernel reduces along
one direction only (a row sum and a column sum need two passes). A kernel reads each tensor from
outside once, and writes only what is read by another kernel, saved for the backward pass or
returned. Matmuls, convolutions and attention keep kernels of their own.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Launch:
    """An op that launches a kernel.

    Args:
        flops: Matmul-like FLOPs; what has any is never fused.
        reads: Storage -> float elements of it that are read.
        writes: Storage -> float elements of it that are written.
    """

    flops: int
    reads: Mapping[int, int]
    writes: Mapping[int, int]

    @property
    def reduced(self) -> int | None:
        """Elements that a reduction leaves; None for an op that is none."""
        most_read, written = (
            max(self.reads.values(), default=0),
            max(self.writes.values(), default=0),
        )
        return written if 0 < written < most_read else None


@dataclass
class Kernel:
    """Ops that run as one.

    Args:
        launches: Indices of its ops, in order.
        after: Indices of the kernels that it needs, directly or not.
        reduced: What its reductions leave, if it has any.
    """

    launches: list[int] = field(default_factory=list)
    after: set[int] = field(default_factory=set)
    reduced: int | None = None


def fuse(launches: Sequence[Launch]) -> list[Kernel]:
    """Kernels in the order of their first ops; each op is in exactly one."""
    kernels: list[Kernel] = []
    maker: dict[int, int] = {}
    for index, launch in enumerate(launches):
        needed = {maker[storage] for storage in (*launch.reads, *launch.writes) if storage in maker}
        chosen = _joined(kernels, launches, launch, needed)
        if chosen is None:
            chosen = len(kernels)
            kernels.append(Kernel(reduced=launch.reduced))
        kernel = kernels[chosen]
        kernel.launches.append(index)
        kernel.reduced = kernel.reduced or launch.reduced
        for other in needed - {chosen}:
            kernel.after |= {other} | kernels[other].after
        _spread(kernels, chosen)
        maker |= dict.fromkeys(launch.writes, chosen)
    return kernels


def _joined(
    kernels: Sequence[Kernel], launches: Sequence[Launch], launch: Launch, needed: set[int]
) -> int | None:
    """The last kernel that an op may join."""
    if launch.flops:
        return None
    for candidate in sorted(needed, reverse=True):
        kernel = kernels[candidate]
        if launches[kernel.launches[0]].flops:
            continue
        if launch.reduced and kernel.reduced and launch.reduced != kernel.reduced:
            continue
        if all(candidate not in kernels[other].after for other in needed - {candidate}):
            return candidate
    return None


def _spread(kernels: Sequence[Kernel], changed: int) -> None:
    """What needs a kernel needs what that kernel needs."""
    for kernel in kernels:
        if changed in kernel.after:
            kernel.after |= kernels[changed].after


def traffic(
    launches: Sequence[Launch], kernels: Sequence[Kernel], kept: Collection[int]
) -> list[int]:
    """Float elements that each kernel reads and writes.

    Args:
        launches: The ops.
        kernels: As `fuse` gives them for these ops.
        kept: Storages that are needed afterwards: outputs, and what is saved.
    """
    readers: dict[int, set[int]] = {}
    for number, kernel in enumerate(kernels):
        for index in kernel.launches:
            for storage in launches[index].reads:
                readers.setdefault(storage, set()).add(number)
    moved = []
    for number, kernel in enumerate(kernels):
        reads: dict[int, int] = {}
        writes: dict[int, int] = {}
        for index in kernel.launches:
            for storage, size in launches[index].reads.items():
                if storage not in writes:
                    reads[storage] = max(reads.get(storage, 0), size)
            for storage, size in launches[index].writes.items():
                writes[storage] = max(writes.get(storage, 0), size)
        leaving = {s for s in writes if s in kept or readers.get(s, set()) - {number}}
        moved.append(sum(reads.values()) + sum(writes[storage] for storage in leaving))
    return moved
