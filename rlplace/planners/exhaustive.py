"""Every plan there is: the optimum of a tiny instance, and nothing else in reasonable time.

Decision space: stages on disjoint sets of devices, every mesh shape with tp groups in the order of
ranks, every layout, ZeRO level and recompute mode of every group, every micro-batch count, 1F1B.
Devices of one kind on one node, none of which shares a core or has a link of its own, are
interchangeable: of plans that differ only by exchanging such devices, one is looked at. Left out:
several stages on a mesh, unequal shares, cp, dp_replicate beside dp_shard, offload.

Complexity: (stages + 1)^devices times options^groups.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations, pairwise, product

import numpy as np

from rlplace.plan.check import legal_micro_batches
from rlplace.plan.types import GroupChoice, Instance, Mesh, Plan, Stage
from rlplace.plan.uniform import make_plan
from rlplace.planners.costing import Costing
from rlplace.planners.search import Search
from rlplace.planners.types import Budget, PlannerResult


def exhaustive(
    instance: Instance, budget: Budget, rng: np.random.Generator, costing: Costing | None = None
) -> PlannerResult:
    """The best of all plans; of the first ones, where the budget ends before."""
    search = Search("exhaustive", costing or Costing(instance), budget)
    for plan in all_plans(instance):
        if search.stopped:
            break
        search.offer(plan)
    return search.result()


def all_plans(instance: Instance, schedule: str = "1f1b") -> Iterator[Plan]:
    """Every plan of the decision space, once for all exchanges of interchangeable devices."""
    groups, devices = len(instance.graph.groups), len(instance.cluster.devices)
    alike = _interchangeable(instance)
    for count in legal_micro_batches(instance.global_batch, 1):
        for stages in range(1, min(groups, devices) + 1):
            for cuts in combinations(range(1, groups), stages - 1):
                spans = [*pairwise((0, *cuts, groups))]
                # Device d works for stage owner[d], or for none.
                for owner in product(range(stages + 1), repeat=devices):
                    if any(owner[a] > owner[b] for a, b in alike):
                        continue
                    parts = [
                        tuple(d for d in range(devices) if owner[d] == s) for s in range(stages)
                    ]
                    for chosen in _lines(instance, spans, parts, count):
                        yield make_plan(instance, chosen, count, schedule)


def _interchangeable(instance: Instance) -> list[tuple[int, int]]:
    """Pairs of devices that may change places, each with the next such one."""
    cluster = instance.cluster
    special = {device for a, b, _ in cluster.overrides for device in (a, b)}
    last: dict[tuple[str, int, int], int] = {}
    pairs = []
    for device in cluster.devices:
        if device.core is not None or device.index in special:
            continue
        place = (device.kind, device.node, cluster.bridge(device.index))
        if place in last:
            pairs.append((last[place], device.index))
        last[place] = device.index
    return pairs


def _lines(
    instance: Instance,
    spans: Sequence[tuple[int, int]],
    parts: Sequence[tuple[int, ...]],
    count: int,
) -> Iterator[tuple[Stage, ...]]:
    """All stages of the spans on the devices, one after the other: a list would be too long."""
    if not spans:
        yield ()
        return
    for stage in _all_stages(instance, spans[0], parts[0], count):
        for rest in _lines(instance, spans[1:], parts[1:], count):
            yield (stage, *rest)


def _all_stages(
    instance: Instance, span: tuple[int, int], devices: tuple[int, ...], count: int
) -> Iterator[Stage]:
    """Every shape of the devices, and every choice of every group."""
    graph, size = instance.graph, len(devices)
    described = [instance.cluster.devices[device] for device in devices]
    for tp in (degree for degree in range(1, size + 1) if size % degree == 0):
        kinds = [{d.kind for d in described[at : at + tp]} for at in range(0, size, tp)]
        if (instance.global_batch // count) % (size // tp) or any(len(own) > 1 for own in kinds):
            continue
        if tp not in instance.offered_tp:
            continue
        options = [
            [
                GroupChoice(layout.name, zero, recompute)  # type: ignore[arg-type]  # a mode
                for layout in graph.structure(group).layouts_at(tp)
                for zero in (instance.zero_levels if size > tp else (0,))
                for recompute in instance.recompute_options(graph.structure(group).work)
            ]
            for group in range(*span)
        ]
        for choices in product(*options):
            yield Stage(*span, Mesh(devices, 1, size // tp, 1, tp), choices)
