"""In which dtypes a run holds weights, gradients and what the optimizer steps."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Dtypes:
    """Dtypes of one precision.

    Args:
        weight: Of parameters as the model uses them, and of activations.
        gradient: In which gradients are summed, over micro-batches and over replicas.
        master: Of the copy that the optimizer steps; None where it steps the weights themselves.
    """

    weight: torch.dtype
    gradient: torch.dtype
    master: torch.dtype | None = None


#: The precisions that the runtime executes (`rlplace.plan.types.PRECISIONS` counts their bytes).
#: The master copy starts from the weights as they are in 16 bits.
PRECISIONS = {
    "fp32": Dtypes(torch.float32, torch.float32),
    "bf16": Dtypes(torch.bfloat16, torch.bfloat16),
    "bf16-mixed": Dtypes(torch.bfloat16, torch.bfloat16, torch.float32),
    "bf16-mixed-fp32grad": Dtypes(torch.bfloat16, torch.float32, torch.float32),
}


def dtypes_for(precision: str, weight: torch.dtype) -> Dtypes:
    """Dtypes of a precision for weights of a dtype.

    Weights of another dtype than the precision has (float64 in tests) are trained as they are.
    """
    known = PRECISIONS.get(precision)
    if known is not None and known.weight == weight:
        return known
    return Dtypes(weight, weight)
