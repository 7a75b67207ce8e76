"""How fast a core is right now: a fixed piece of work, timed before and after every step.

The speed of a virtual machine drifts by a third within minutes, and by a tenth from step to step.
The seconds are those of the thread, so that ranks that take turns on a core measure the core and
not the turns.
"""

from __future__ import annotations

import time

import torch
import torch.nn.functional as F

_TOKENS, _WIDTH, _REPEATS = 256, 512, 3


def reference() -> float:
    """Seconds of the core for matmuls and memory-bound ops of the sizes of a small transformer."""
    x = torch.ones(_TOKENS, _WIDTH)
    up, down = torch.ones(4 * _WIDTH, _WIDTH), torch.ones(_WIDTH, 4 * _WIDTH)
    _block(x, up, down)
    start = time.thread_time()
    for _ in range(_REPEATS):
        _block(x, up, down)
    return (time.thread_time() - start) / _REPEATS


def _block(x: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> None:
    for _ in range(2):
        x = F.layer_norm(x + F.gelu(x @ up.t()) @ down.t(), (_WIDTH,))
