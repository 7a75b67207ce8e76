"""How a training framework runs a program: what the host costs, what overlaps, what is kept.

A few constants of a framework stand beside those of a device kind and of a link: they say what the
same model on the same devices costs more or less under another trainer. The shipped values come
from `configs/calibration.json`, which says what they were fitted on.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Literal, get_args

from rlplace.cluster.calibrated import shipped
from rlplace.errors import InputError, nearest_names

#: How stages pass activations and gradients on; see `Framework.sends`.
Sends = Literal["beside", "at once", "in turn"]


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
        loss_bytes: Bytes that its loss moves of each class score, forward and backward together; 0
            for what was counted at capture.
        attention: Speed of its flash attention kernel, relative to the second generation's.
        overlap_reduce: Share of the gradient reduction that may hide behind the last backward.
        overlap_gather: Share of ZeRO's gathers and scatters that may hide behind compute.
        overlap_exchange: Share of a layer's tensor parallel collectives that runs beside the
            matmuls that they feed, piece by piece (asynchronous tensor parallelism); the first
            piece never does.
        early_stop: Whether recompute ends with the last tensor that the backward pass needs, so
            that the last matmul of what is redone is not (PyTorch's non-reentrant checkpoint).
        redone_matmuls: Share of the matmuls that the recompute mode ``ops`` redoes.
        cast: Bytes that casting an element to fp8 moves, of all inputs of matmuls and of their
            gradients: 3 where it is read in 16 bits and written once.
        gather_bytes: Bytes of a weight that ZeRO-3 gathers; 0 for those of the precision.
        bucket: Bytes of gradients that are reduced at a time, and of weights that ZeRO-1 and 2
            gather; 0 for those of each group on their own.
        scatters: Whether ZeRO-1 reduce-scatters gradients; otherwise it all-reduces them and each
            rank takes its part.
        clips: Whether the gradients are clipped to a norm before the optimizer steps.
        regather: Whether sequence parallelism keeps the shard only and gathers again in the
            backward pass (Korthikanti et al., arXiv 2205.05198, section 4.2.2).
        parts: Whether between stages each tp rank sends its own part of what all of them hold (the
            ranks of the next stage gather it), not the whole.
        sends: How stages pass activations and gradients on. ``beside``: beside compute. The other
            two block: a send starts when its stage has made what it sends and the next has run
            all that comes before what reads it, and both wait until it ends. ``at once``: what a
            stage sends and what it receives next go both ways at once, as in a batch of isend and
            irecv (Megatron-LM). ``in turn``: one after the other (DeepSpeed's pipeline engine).
        buffer: Bytes of a rank's message which the transport takes before its receiver asks for
            them: no longer a message never blocks. NCCL's NCCL_BUFFSIZE is 4 MiB by default.
        score_bytes: Bytes of a class score in the loss: 4 where it is computed in fp32 whatever the
            precision, 2 where it stays in the precision of the activations.
        score_copies: Tensors as large as the class scores, and as wide, that the backward pass of
            the loss makes at once beside what it keeps: 2 in PyTorch (the gradient of the
            log-probabilities and that of the scores), 3 in its loss on shards of the vocabulary.
        both_gradients: Whether the 16-bit gradients of all parameters wait beside their fp32 sums
            until the backward pass is done (Nanotron's accumulator, DeepSpeed's bf16 optimizer);
            otherwise each is added and freed at once.
        step_bytes: Bytes a parameter that the optimizer step makes and frees, as the fp32 copies of
            16-bit gradients that DeepSpeed's ZeRO makes of its part.
        flattens: Whether gradients that no ZeRO level shards are copied into one buffer to be
            reduced (DeepSpeed), for which no block of an activation is large enough.
        reserve: Bytes that it takes on top of the device's own reserve.
        fragmentation: Share of states and activations that the allocator needs on top.
        cached: Share of them that the allocator keeps beyond that where there is room: what the
            driver's tool shows and a run could do without.
        band: Measured over predicted step time, 10th and 90th percentile of the rows that were
            not fitted; a quarter either way where nothing was measured.
    """

    name: str
    launch: float = 0.0
    backward_launch: float = 0.0
    collective_launch: float = 0.0
    step_overhead: float = 0.0
    fusion: float = 0.0
    loss_bytes: float = 0.0
    attention: float = 1.0
    overlap_reduce: float = 1.0
    overlap_gather: float = 1.0
    overlap_exchange: float = 0.0
    early_stop: bool = False
    redone_matmuls: float = 0.0
    cast: float = 3.0
    gather_bytes: int = 0
    bucket: float = 0.0
    scatters: bool = True
    clips: bool = True
    regather: bool = False
    parts: bool = False
    sends: Sends = "beside"
    buffer: float = 0.0
    score_bytes: int = 4
    score_copies: float = 2.0
    both_gradients: bool = False
    step_bytes: float = 0.0
    flattens: bool = False
    reserve: float = 0.0
    fragmentation: float = 0.0
    cached: float = 0.0
    band: tuple[float, float] = (0.75, 1.25)

    def __post_init__(self) -> None:
        """Refuse sends of no kind."""
        if self.sends not in get_args(Sends):
            rule = f"must be one of {', '.join(get_args(Sends))}"
            raise InputError("framework.sends", self.sends, rule, "beside")


@cache
def frameworks() -> dict[str, Framework]:
    """Every framework that is known, by name."""
    known = {field.name for field in fields(Framework)}
    made = {}
    for name, constants in shipped("frameworks").items():
        if unknown := set(constants) - known:
            raise InputError(f"frameworks.{name}", sorted(unknown), "no constants of a framework")
        band = tuple(constants.get("band", Framework(name).band))
        made[name] = replace(Framework(name), **(constants | {"band": band}))
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
