"""How a training framework runs a program: what the host costs, what overlaps, what is kept.

A few constants of a framework stand beside those of a device kind and of a link: they say what the
same model on the same devices costs more or less under another trainer. The shipped values come
from `configs/calibration.json`, which says what they were fitted on.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields, replace
from functools import cache

from rlplace.errors import InputError, nearest_names
from rlplace.resources import resource


@dataclass(frozen=True, slots=True)
class Framework:
    """How a program is executed.

    Args:
        name: Key of `frameworks()`.
        launch: Host seconds of an op of the forward pass. The host runs ahead of the device, so a
            micro-batch takes the longer of the two, not their sum. 0 with CUDA graphs.
        backward_launch: Host seconds of an op of the backward pass (run by the autograd engine).
        collective_launch: Host seconds of a collective inside a layer, on top of `launch`.
        step_overhead: Host seconds of a step that nothing hides: gradient norm, scheduler, logs.
        fusion: Share of the traffic and of the kernels that fusing memory-bound ops could save
            (`rlplace.graph.fusion`) which is saved, by a compiler or by kernels written for it.
        attention: Speed of its flash attention kernel, relative to the second generation's.
        overlap_reduce: Share of the gradient reduction that may hide behind the last backward.
        overlap_gather: Share of ZeRO's gathers and scatters that may hide behind compute.
        bucket: Bytes of gradients that are reduced at a time, and of weights that ZeRO-1 and 2
            gather; 0 for those of each group on their own.
        scatters: Whether ZeRO-1 reduce-scatters gradients; otherwise it all-reduces them and each
            rank takes its part.
        regather: Whether sequence parallelism keeps the shard only and gathers again in the
            backward pass (Korthikanti et al., arXiv 2205.05198, section 4.2.2).
        parts: Whether between stages each tp rank sends its own part of what all of them hold (the
            ranks of the next stage gather it), not the whole.
        reserve: Bytes that it takes on top of the device's own reserve.
        fragmentation: Share of states and activations that the allocator needs on top.
        cached: Share of them that the allocator keeps beyond that where there is room: what the
            driver's tool shows and a run could do without.
        band: Measured over predicted step time, 10th and 90th percentile of the rows that were
            not fitted.
    """

    name: str
    launch: float = 0.0
    backward_launch: float = 0.0
    collective_launch: float = 0.0
    step_overhead: float = 0.0
    fusion: float = 0.0
    attention: float = 1.0
    overlap_reduce: float = 1.0
    overlap_gather: float = 1.0
    bucket: float = 0.0
    scatters: bool = True
    regather: bool = False
    parts: bool = False
    reserve: float = 0.0
    fragmentation: float = 0.0
    cached: float = 0.0
    band: tuple[float, float] = (0.75, 1.25)


@cache
def frameworks() -> dict[str, Framework]:
    """Every framework that is known, by name."""
    found = json.loads(resource("configs/calibration.json").read_text())["frameworks"]
    known = {field.name for field in fields(Framework)}
    made = {}
    for name, constants in found.items():
        if unknown := set(constants) - known:
            raise InputError(f"frameworks.{name}", sorted(unknown), "no constants of a framework")
        constants["band"] = tuple(constants.get("band", Framework("").band))
        made[name] = replace(Framework(name), **constants)
    return made


def framework(name: str) -> Framework:
    """A framework by name.

    Raises:
        InputError: If there is none, with the nearest name.
    """
    known = frameworks()
    if name not in known:
        rule = f"must be one of {', '.join(known)}"
        raise InputError("framework", name, rule, nearest_names(name, known) or "torch")
    return known[name]
