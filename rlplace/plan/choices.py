"""Whether the choices of a stage's groups are legal: layouts, ZeRO, recompute, offload, slices."""

from __future__ import annotations

import warnings

from rlplace.errors import InputError, nearest_names
from rlplace.graph.neighbours import disagreement
from rlplace.graph.types import Affine, Layout
from rlplace.plan.degrees import nearest
from rlplace.plan.types import (
    JOINED,
    RECOMPUTE_MODES,
    Instance,
    Stage,
    redoes_attention,
)


def check_choices(instance: Instance, index: int, stage: Stage) -> None:
    """Refuse choices that the groups of a stage do not have.

    Args:
        instance: The question.
        index: Position of the stage in its plan.
        stage: The stage.

    Raises:
        InputError: With the field, the value, the rule and the nearest legal value.
    """
    field = f"plan.stages[{index}].choices"
    if len(stage.choices) != stage.stop - stage.start:
        rule = "one choice for each group of the stage"
        raise InputError(field, len(stage.choices), rule, stage.stop - stage.start)
    for at, choice in enumerate(stage.choices):
        _check_layout(instance, stage, at, f"{field}[{at}].layout")
        if choice.zero not in (0, 1, 2, 3):
            rule = "a ZeRO level is 0, 1, 2 or 3"
            raise InputError(
                f"{field}[{at}].zero", choice.zero, rule, nearest(choice.zero, (0, 1, 2, 3))
            )
        _check_recompute(instance, stage, at, f"{field}[{at}].recompute")
        if choice.offload:
            _check_offload(instance, stage, f"{field}[{at}].offload")
        if choice.slices != 1:
            _check_slices(instance, stage, at, f"{field}[{at}].slices")
    _check_borders(instance, stage, field)


def _check_layout(instance: Instance, stage: Stage, at: int, field: str) -> None:
    group, name = stage.start + at, stage.choices[at].layout
    layouts = instance.graph.structure(group).layouts_with("tp", stage.mesh.tp)
    legal = tuple(dict.fromkeys(layout.name for layout in layouts))
    if name not in legal:
        where = instance.graph.groups[group].name
        rule = f"{where} has the layouts {', '.join(legal)} at tp={stage.mesh.tp}"
        raise InputError(field, name, rule, nearest_names(name, legal) or legal[-1])


def _check_recompute(instance: Instance, stage: Stage, at: int, field: str) -> None:
    mode, group = stage.choices[at].recompute, stage.start + at
    known = (*RECOMPUTE_MODES, JOINED)
    if mode not in known:
        rule = f"recompute is one of {', '.join(known)}"
        raise InputError(field, mode, rule, nearest_names(mode, known) or "none")
    if mode == JOINED and (at == 0 or stage.choices[at - 1].recompute not in ("full", JOINED)):
        rule = "it is redone with the group before it, which has to be full or joined as well"
        raise InputError(field, mode, rule, "full")
    if mode != "attention":
        return
    if not redoes_attention(instance.graph.structure(group).work):
        rule = f"{instance.graph.groups[group].name} has no core attention to redo"
        raise InputError(field, mode, rule, "none")
    if instance.attention == "flash":
        warnings.warn(
            "recompute=attention frees about nothing with a flash kernel, which keeps no score "
            "matrix, and costs its time; take none or full, or plan for attention=math",
            stacklevel=2,
        )


def _check_offload(instance: Instance, stage: Stage, field: str) -> None:
    for device in stage.mesh.devices:
        kind = instance.cluster.kind(device)
        if not kind.host_bandwidth:
            rule = f"{kind.name} has no memory of a host beside its own"
            raise InputError(field, True, rule, False)


def _check_slices(instance: Instance, stage: Stage, at: int, field: str) -> None:
    choice, group = stage.choices[at], stage.start + at
    if choice.slices < 1:
        raise InputError(field, choice.slices, "a weight is at least one slice", 1)
    layouts = instance.graph.structure(group).layouts_with("tp", stage.mesh.tp)
    work = next(own.work for own in layouts if own.name == choice.layout)
    name, rows = instance.graph.groups[group].name, [one.rows for one in work.weights]
    broken = {
        "slices are of weights that are gathered: zero is 3, on more than one shard": (
            choice.zero != 3 or stage.mesh.shards == 1
        ),
        "what is gathered slice by slice is not redone: recompute is none": (
            choice.recompute != "none"
        ),
        "a loss that goes in chunks takes the whole weight of its linear": (
            instance.loss_chunks > 1 and work.logits_bytes != Affine()
        ),
        f"{name} has no weight that one matmul alone uses": not rows,
    }
    for rule, holds in broken.items():
        if holds:
            raise InputError(field, choice.slices, rule, 1)
    if not any(choice.cuts(one) for one in work.weights):
        legal = tuple({n for each in rows for n in range(1, each + 1) if each % n == 0})
        rule = f"it divides the rows of a weight of {name}: {', '.join(map(str, rows))}"
        raise InputError(field, choice.slices, rule, nearest(choice.slices, legal))


def _check_borders(instance: Instance, stage: Stage, field: str) -> None:
    """A tensor is handed on in the placement in which its readers take it."""
    graph, tp = instance.graph, stage.mesh.tp
    if tp == 1:
        return
    found: dict[int, Layout] = {}
    for group, choice in enumerate(stage.choices, stage.start):
        layouts = graph.structure(group).layouts_with("tp", tp)
        found[group] = next(own for own in layouts if own.name == choice.layout)
    if (edge := disagreement(graph, found)) is not None:
        at = edge.dst - stage.start
        maker, reader = graph.groups[edge.src].name, graph.groups[edge.dst].name
        rule = f"{reader} does not read {edge.tensor} as {maker} hands it on"
        near = stage.choices[edge.src - stage.start].layout
        raise InputError(f"{field}[{at}].layout", stage.choices[at].layout, rule, near)
