"""Tied parameters inside a stage: all groups that use one hold it in the same placement."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from rlplace.graph.types import Layout, OpGraph, Placement, Replicate
from rlplace.plan.types import GroupChoice, Stage


def settle(graph: OpGraph, stage: Stage) -> Stage:
    """The stage with the layouts of groups that share a parameter made to agree.

    Where they do not, the first sharded placement that all of them have is taken, else
    `Replicate`, which every group has. Other choices stay.
    """
    if stage.mesh.tp == 1:
        return stage
    choices = list(stage.choices)
    for name, users in _shared(graph, stage):
        held = [_held(graph, g, name, choices[g - stage.start], stage.mesh.tp) for g in users]
        if len(set(held)) > 1:
            layouts = _common(graph, users, name, stage.mesh.tp)
            for group, layout in zip(users, layouts, strict=True):
                at = group - stage.start
                choices[at] = replace(choices[at], layout=layout)
    return replace(stage, choices=tuple(choices)) if choices != list(stage.choices) else stage


def conflict(graph: OpGraph, *stages: Stage) -> tuple[int, str] | None:
    """A group of a mesh's stages and a parameter that it holds in another way than one before."""
    for name, _ in graph.tied:
        wanted: Placement | None = None
        for stage in stages:
            for group, choice in zip(range(stage.start, stage.stop), stage.choices, strict=True):
                if name not in graph.groups[group].params:
                    continue
                found = _held(graph, group, name, choice, stage.mesh.tp)
                if wanted is not None and found != wanted:
                    return group, name
                wanted = found
    return None


def _shared(graph: OpGraph, stage: Stage) -> Iterator[tuple[str, list[int]]]:
    """Tied parameters that several groups of the stage use, with these groups."""
    for name, _ in graph.tied:
        users = [g for g in range(stage.start, stage.stop) if name in graph.groups[g].params]
        if len(users) > 1:
            yield name, users


def _held(graph: OpGraph, group: int, name: str, choice: GroupChoice, tp: int) -> Placement:
    """How a group holds a parameter under a choice."""
    layouts = graph.structure(group).layouts_with("tp", tp)
    return _placements(graph, group, name, layouts).get(choice.layout, Replicate())


def _placements(
    graph: OpGraph, group: int, name: str, layouts: Iterable[Layout]
) -> dict[str, Placement]:
    """How a group holds a parameter under each of some layouts."""
    at = graph.groups[group].params.index(name)
    return {layout.name: layout.params[at] if layout.params else Replicate() for layout in layouts}


def _common(graph: OpGraph, users: list[int], name: str, tp: int) -> list[str]:
    """For each group a layout, so that all hold the parameter alike."""
    whole = (reversed(graph.structure(group).layouts_at(tp)) for group in users)
    offers = [_placements(graph, g, name, own) for g, own in zip(users, whole, strict=True)]
    for wanted in (*offers[0].values(), Replicate()):
        found = [next((n for n, p in offer.items() if p == wanted), None) for offer in offers]
        if all(layout is not None for layout in found):
            return [layout for layout in found if layout is not None]
    raise AssertionError("every group has the layout replicate")
