"""Context parallelism: what a rank of the cp axis does, from a layout of the tp axis.

A rank has an equal part of every sequence, dealt out so that a causal mask leaves all ranks as much
to do, and all parameters of its tp rank. What is counted by sample is then that of ``samples / cp``
whole samples, also in attention: its queries are so many, and meet all keys. Keys and values go
around the ranks (Liu et al., arXiv 2310.01889): the collectives of the layouts on the cp axis, of
which a tp rank has those of its own heads.
"""

from __future__ import annotations

from dataclasses import replace

from rlplace.cost.compute import Compute
from rlplace.errors import InputError
from rlplace.graph.types import Affine, Collective, Structure
from rlplace.plan.types import Mesh

#: Share by which attention over very many ranks takes longer than in one kernel: it goes block by
#: block, with a kernel for each, and merges what they give.
_RING_COST = 0.33


def ring_attention(own: Compute, ranks: int) -> Compute:
    """The compute of a group whose attention goes around so many ranks."""
    if ranks == 1 or not own.attention:
        return own
    longer = _RING_COST * (1.0 - 1.0 / ranks)
    return replace(
        own,
        forward=own.forward + longer * own.attention,
        backward=own.backward + longer * own.attention_back,
        attention=own.attention * (1.0 + longer),
        attention_back=own.attention_back * (1.0 + longer),
    )


def context_collectives(structure: Structure, mesh: Mesh) -> tuple[Collective, ...]:
    """What a group sends on the cp axis of a mesh, for the samples of a rank.

    Raises:
        InputError: If it has layouts on the axis and none of this degree.
    """
    if mesh.cp == 1:
        return ()
    layouts = {layout.degree: layout for layout in structure.bordered if layout.axis == "cp"}
    if not layouts:
        return ()
    if mesh.cp not in layouts:
        near = min(layouts, key=lambda degree: abs(degree - mesh.cp))
        raise InputError("cp", mesh.cp, f"layouts are known at {sorted(layouts)}", near)
    return tuple(
        replace(one, floats=_for_a_rank(one.floats, mesh)) for one in layouts[mesh.cp].collectives
    )


def _for_a_rank(floats: Affine, mesh: Mesh) -> Affine:
    """Elements by the samples of a rank; a layout counts the whole tensor of a replica's."""
    return Affine(floats.base / mesh.tp, floats.per_sample * mesh.cp / mesh.tp)
