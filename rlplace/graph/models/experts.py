"""The experts of a mixture as two grouped matmuls, the same on every device.

transformers' own grouped form branches on the device, so that what is captured without one would
not run on a CPU. Only the tokens that chose an expert are computed: FLOPs are those of the
`top_k` experts of each token, whichever they are.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

#: Name of the implementation, for transformers' `ExpertsInterface`.
NAME = "rlplace_grouped_mm"


def grouped_experts(
    module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """The weighted sum of what the chosen experts make of each token.

    Args:
        module: Holds `gate_up_proj` (experts, 2 * ffn, hidden) and `down_proj` (experts, hidden,
            ffn).
        hidden_states: (tokens, hidden).
        top_k_index: Experts of each token, (tokens, k).
        top_k_weights: Their weights, (tokens, k).
    """
    tokens, k = top_k_index.shape
    experts, order = torch.sort(top_k_index.reshape(-1))
    # On the CPU histc takes floats only.
    sizes = torch.histc(experts.float(), module.num_experts, min=0, max=module.num_experts - 1)
    ends = torch.cumsum(sizes, dim=0, dtype=torch.int32)
    grouped = torch.ops.transformers.grouped_mm_fallback
    rows = hidden_states[order // k]
    inner = module._apply_gate(grouped(rows, module.gate_up_proj.transpose(-2, -1), ends))
    outer = grouped(inner, module.down_proj.transpose(-2, -1), ends)
    weighted: Tensor = outer * top_k_weights.reshape(-1)[order].unsqueeze(-1)
    return weighted[torch.argsort(order)].view(tokens, k, -1).sum(dim=1)
