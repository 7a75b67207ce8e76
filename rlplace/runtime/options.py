"""How a run goes, beside its plan."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rlplace.errors import InputError
from rlplace.plan.types import Plan
from rlplace.runtime.checkpoint import Checkpoints
from rlplace.runtime.cuts import BUCKET_BYTES
from rlplace.runtime.precision import PRECISIONS


@dataclass(frozen=True)
class Options:
    """How a run goes.

    Args:
        steps: Measured steps.
        warmup: Steps before them; in the very first step memory is counted.
        lr: Learning rate of the named optimizers.
        seed: Seed of the parameters and of dropout.
        overlap: Reduce gradients while backward runs.
        bucket_bytes: Gradients that are reduced together.
        collect: Gather full gradients, weights and buffers to rank 0 after the last step.
        dtype: Replaces the dtype of the plan's precision (``float64`` in tests).
        clip: Largest global 2-norm of the gradients; None leaves them as they are.
        checkpoint: Where and how often the state is saved; a training goes on from what is there.
    """

    steps: int = 20
    warmup: int = 3
    lr: float = 1e-3
    seed: int = 0
    overlap: bool = True
    bucket_bytes: int = BUCKET_BYTES
    collect: bool = False
    dtype: str | None = None
    clip: float | None = None
    checkpoint: Checkpoints | None = None

    def __post_init__(self) -> None:
        for name, value, least in (("steps", self.steps, 1), ("warmup", self.warmup, 0)):
            if value < least:
                raise InputError(name, value, f"must be at least {least}", least)
        if self.clip is not None and not self.clip > 0.0:
            raise InputError("clip", self.clip, "must be above 0", 1.0)
        if self.dtype not in (None, "float64", "float32", "bfloat16"):
            raise InputError("dtype", self.dtype, "must be float64, float32 or bfloat16")

    def dtype_for(self, plan: Plan) -> torch.dtype:
        """The dtype of float parameters and inputs."""
        if self.dtype is not None:
            found = getattr(torch, self.dtype)
            assert isinstance(found, torch.dtype)
            return found
        known = PRECISIONS.get(plan.precision)
        return known.weight if known is not None else torch.float32
