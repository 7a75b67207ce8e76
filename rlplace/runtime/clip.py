"""The norm of all gradients of a model, whatever ranks have them, and clipping by it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

#: What torch adds to the norm.
_EPSILON = 1e-6


@torch.no_grad()
def clip(own: Sequence[Tensor], every: Iterable[Tensor], max_norm: float, group: Any) -> float:
    """Scale gradients so that their global 2-norm is at most `max_norm`.

    As `torch.nn.utils.clip_grad_norm_` on one process, but for the order of sums. Like there, an
    infinite norm leaves zeros (and NaN where a gradient is infinite), and a norm of NaN only NaN.

    Args:
        own: Gradients that this rank counts: over all ranks of the group, each element once.
        every: Gradients that this rank scales.
        max_norm: The largest norm.
        group: The ranks that have gradients; None where there is one.

    Returns:
        The norm before.
    """
    every = list(every)
    device = every[0].device if every else torch.device("cpu")
    total = torch.zeros((), dtype=torch.float64, device=device)
    for gradient in own:
        wide = gradient if gradient.dtype == torch.float64 else gradient.float()
        total += torch.linalg.vector_norm(wide).double() ** 2
    if group is not None:
        dist.all_reduce(total, group=group)
    norm = float(total.sqrt())
    scale = max_norm / (norm + _EPSILON)
    if not scale >= 1.0:  # also NaN
        for gradient in every:
            gradient.mul_(scale)
    return norm
