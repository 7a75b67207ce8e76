"""What a rank holds when it holds most, by cause, and what it holds at most in each phase."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch

from rlplace.runtime.assemble import Assembly
from rlplace.runtime.memory import Peak, tensor_bytes
from rlplace.simulate.peaks import OPTIMIZER, REDUCE
from rlplace.simulate.types import MemoryUse


@dataclass(frozen=True)
class Counted:
    """What was counted in the first step of a rank.

    Args:
        kept: Peak bytes of what it kept for backward.
        live: The most that the step had made and not freed yet, `kept` included, by kind of phase.
        made: Bytes of the states that the optimizer made, which stay.
    """

    kept: int = 0
    live: Mapping[str, Peak] = field(default_factory=dict)
    made: int = 0


@dataclass(frozen=True)
class Use:
    """Peak bytes of a rank by cause, what it did then, and its peak in each kind of phase."""

    memory: MemoryUse = field(default_factory=MemoryUse)
    phase: str = ""
    peaks: dict[str, float] = field(default_factory=dict)


def peak_use(assembly: Assembly, counted: Counted, device: torch.device) -> Use:
    """What a rank uses.

    Args:
        assembly: What the rank runs.
        counted: What its first step made.
        device: A GPU's allocator knows the peak of everything, ops that are not seen among it.
    """
    held, reducer = _states(assembly), assembly.reducer
    lent = reducer.lent_peak if reducer is not None else 0
    live = {
        kind: peak.bytes - (counted.made if kind == OPTIMIZER else 0)
        for kind, peak in counted.live.items()
    }
    live |= {kind: size + lent for kind, size in live.items() if kind not in (REDUCE, OPTIMIZER)}
    if not live:
        return Use(held)
    fullest = max(live, key=live.__getitem__)
    most = live[fullest]
    if device.type == "cuda":
        most = torch.cuda.max_memory_allocated(device) - int(held.total)
    kept = 0 if fullest in (REDUCE, OPTIMIZER) else counted.kept
    return Use(
        replace(held, activations=kept, transient=max(0, most - kept)),
        counted.live[fullest].words,
        {kind: held.total + size for kind, size in live.items()},
    )


def optimizer_states(assembly: Assembly, *, on_device: bool = False) -> list[torch.Tensor]:
    """Tensors among the states of a rank's optimizer, all or those on its device."""
    if assembly.optimizer is None:
        return []
    away = assembly.reducer.on_host if on_device and assembly.reducer is not None else set()
    found = (own for param, own in assembly.optimizer.state.items() if id(param) not in away)
    return [value for own in found for value in own.values() if isinstance(value, torch.Tensor)]


def _states(assembly: Assembly) -> MemoryUse:
    held = [*assembly.params().values(), *assembly.buffers().values()]
    use = MemoryUse(
        params=tensor_bytes(held),
        optimizer=tensor_bytes(optimizer_states(assembly, on_device=True)),
    )
    reducer = assembly.reducer
    if reducer is None:
        return use
    return replace(
        use,
        params=use.params + reducer.weight_bytes,
        gradients=reducer.gradient_bytes,
        optimizer=use.optimizer + reducer.copy_bytes,
    )
