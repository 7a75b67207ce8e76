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
from dataclasses import dataclass

import torch
from torch import fx

from rlplace.graph.sharding.nodes import argument, op_name


def seed_of(*numbers: int) -> int:
    """A seed that depends on some numbers and their order, the same on every machine."""
    packed = struct.pack(f"<{len(numbers)}q", *numbers)
    return int.from_bytes(hashlib.blake2b(packed, digest_size=8).digest(), "little") >> 1


#: States of the generators of the CPU and, on a GPU, of the device.
_States = tuple[torch.Tensor, torch.Tensor | None]


@dataclass
class Stream:
    """Where the generators of a group are, for parts of it that draw one after the other."""

    states: _States | None = None


@contextmanager
def drawing(
    seed: int, device: torch.device, stream: Stream | None = None, *, goes_on: bool = False
) -> Iterator[None]:
    """Draw from generators with a seed inside, and leave them as they were.

    Args:
        seed: The seed.
        device: What is drawn for.
        stream: Takes over where the generators are in the end.
        goes_on: Begin where the stream is, not with the seed.
    """
    before = _states(device)
    torch.manual_seed(seed)
    if goes_on and stream is not None and stream.states is not None:
        _restore(stream.states, device)
    try:
        yield
    finally:
        if stream is not None:
            stream.states = _states(device)
        _restore(before, device)


def _states(device: torch.device) -> _States:
    on_gpu = device.type == "cuda"
    return torch.get_rng_state(), torch.cuda.get_rng_state(device) if on_gpu else None


def _restore(states: _States, device: torch.device) -> None:
    own, other = states
    torch.set_rng_state(own)
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
