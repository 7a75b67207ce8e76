"""Random numbers that depend on the samples that they are for, and on nothing else of a plan.

Each group draws from a generator that is seeded anew: from the seed of the run, the step, the first
row of the global batch among its samples, and the group. So dropout draws the same masks whatever
the schedule, the cuts into stages, the recompute and the rank that runs a group, and a group that
is redone in the backward pass needs no state of a generator. Replicas draw for their own rows:
what two replicas of a micro-batch draw is what one process draws for two micro-batches.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import fx

from rlplace.graph.sharding.nodes import argument, op_name


def seed_of(*numbers: int) -> int:
    """A seed that depends on some numbers and their order, the same on every machine."""
    packed = struct.pack(f"<{len(numbers)}q", *numbers)
    return int.from_bytes(hashlib.blake2b(packed, digest_size=8).digest(), "little") >> 1


@contextmanager
def drawing(seed: int, device: torch.device) -> Iterator[None]:
    """Draw from generators with a seed inside, and leave them as they were."""
    on_gpu = device.type == "cuda"
    state, other = torch.get_rng_state(), torch.cuda.get_rng_state(device) if on_gpu else None
    torch.manual_seed(seed)
    try:
        yield
    finally:
        torch.set_rng_state(state)
        if other is not None:
            torch.cuda.set_rng_state(other, device)


def draws(node: fx.Node) -> bool:
    """Whether a node draws random numbers."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return False
    if torch.Tag.nondeterministic_seeded not in target.tags:
        return False
    name = op_name(node).rstrip("_")
    if name == "dropout":
        return bool(node.args[1]) and bool(node.args[2])
    if name == "scaled_dot_product_attention":
        return bool(argument(node, 4, "dropout_p", 0.0))
    return True
