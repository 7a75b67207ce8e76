"""Which link limits a plan, and what the same plan takes with less traffic over it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Literal

from rlplace.cluster.types import Cluster, Link, Node
from rlplace.plan.types import Instance, Mesh, Plan, Stage
from rlplace.simulate.estimate import Estimator
from rlplace.simulate.types import Estimate
from rlplace.units import format_bytes, format_seconds

Place = Literal["intra", "nic"]

_WHERE: dict[Place, str] = {"intra": "inside a node", "nic": "between nodes"}
#: A link that costs less than this share of the step limits nothing.
_SLOW = 0.1
#: A change that gains less than this share of the step is not told.
_GAIN = 0.02
#: Times as fast as any link: what it carries costs nothing.
_FREE = 1e6


def link_seconds(instance: Instance, plan: Plan, estimate: Estimate) -> dict[Place, float]:
    """Seconds by which the step would be shorter if the links of a place cost nothing.

    Empty where the cluster has measured collectives or pairs of its own, which say nothing about
    where they run.
    """
    cluster = instance.cluster
    if cluster.curves or cluster.overrides:
        return {}
    found: dict[Place, float] = {}
    for place in _WHERE:
        free = replace(instance, cluster=_with_free(cluster, place))
        found[place] = estimate.step_time - Estimator(free).estimate(plan).step_time
    return found


def explain_links(instance: Instance, plan: Plan, estimate: Estimate) -> list[str]:
    """The slow link, if there is one, and plans that ask less of it.

    Args:
        instance: The question.
        plan: A legal plan.
        estimate: Its estimate.
    """
    lost = link_seconds(instance, plan, estimate)
    slow = [place for place in lost if lost[place] > _SLOW * estimate.step_time]
    if not slow:
        return []
    told = [
        f"the slow link is {_name(instance.cluster, place)} {_WHERE[place]}: "
        f"{format_seconds(lost[place])} of the step are spent on it"
        for place in sorted(slow, key=lambda place: -lost[place])
    ]
    better = _better(instance, plan, estimate.step_time)
    return told + [_compared(text, estimate, other) for text, other in better]


def fewer_gathers(plan: Plan, level: int) -> Plan:
    """The same plan with no ZeRO level above `level`."""
    return replace(
        plan,
        stages=tuple(
            replace(
                stage,
                choices=tuple(replace(c, zero=min(c.zero, level)) for c in stage.choices),
            )
            for stage in plan.stages
        ),
    )


def sharded_inside(cluster: Cluster, plan: Plan) -> Plan:
    """The same plan with states sharded inside nodes and replicated across them (HSDP)."""
    stages = (replace(stage, mesh=_inside(cluster, stage.mesh)) for stage in plan.stages)
    return replace(plan, stages=tuple(stages))


def _better(instance: Instance, plan: Plan, now: float) -> Iterator[tuple[str, Estimate]]:
    """Changes that fit and are faster than `now` seconds, each for itself."""
    estimator = Estimator(instance)
    inside = sharded_inside(instance.cluster, plan)
    if inside != plan:
        mesh = inside.stages[0].mesh
        name = (
            "sharding inside each node and replicating across nodes "
            f"(dp_replicate={mesh.dp_replicate}, dp_shard={mesh.dp_shard})"
        )
        found = estimator.estimate(inside)
        if found.feasible and found.step_time < (1.0 - _GAIN) * now:
            yield name, found
    zero = max((_zero(stage) for stage in plan.stages), default=0)
    lower = [(level, estimator.estimate(fewer_gathers(plan, level))) for level in range(zero)]
    fitting = [(level, found) for level, found in lower if found.feasible]
    if fitting:
        level, found = min(fitting, key=lambda pair: pair[1].step_time)
        if found.step_time < (1.0 - _GAIN) * now:
            yield f"fewer gathers and scatters, ZeRO-{level} in place of ZeRO-{zero}", found


def _compared(text: str, now: Estimate, other: Estimate) -> str:
    return (
        f"{text} takes {format_seconds(other.step_time)} instead of "
        f"{format_seconds(now.step_time)}, and {format_bytes(max(other.peak_memory))} of a device"
    )


def _zero(stage: Stage) -> int:
    """The highest ZeRO level of a stage, where there is something to shard over."""
    return max(choice.zero for choice in stage.choices) if stage.mesh.dp_shard > 1 else 0


def _inside(cluster: Cluster, mesh: Mesh) -> Mesh:
    """The mesh with dp_shard no wider than a node; as it is where nodes do not hold whole parts."""
    nodes = [cluster.devices[device].node for device in mesh.devices]
    sizes, inner = Counter(nodes), mesh.cp * mesh.tp
    per_node = min(sizes.values())
    whole = len(set(sizes.values())) == 1 and nodes == sorted(nodes) and per_node % inner == 0
    shard = per_node // inner
    if not whole or mesh.dp_shard <= shard or mesh.dp_shard % shard or shard == 1:
        return mesh
    return replace(mesh, dp_replicate=mesh.dp // shard, dp_shard=shard)


def _with_free(cluster: Cluster, place: Place) -> Cluster:
    return replace(cluster, nodes=tuple(_node_with_free(node, place) for node in cluster.nodes))


def _node_with_free(node: Node, place: Place) -> Node:
    if place == "intra":
        return replace(node, intra=_free(node.intra), bridge=0)
    return replace(node, nic=_free(node.nic) if node.nic else None)


def _free(link: Link) -> Link:
    return replace(link, bandwidth=link.bandwidth * _FREE, latency=0.0, relay=0.0)


def _name(cluster: Cluster, place: Place) -> str:
    """The slowest link of a place, with what it carries."""
    if place == "intra":
        link = min((node.intra for node in cluster.nodes), key=lambda link: link.speed)
        return f"{link.name} ({link.speed / 1e9:.3g} GB/s a device)"
    link = min((node.nic for node in cluster.nodes if node.nic), key=lambda link: link.speed)
    return f"{link.name} ({link.speed / 1e9:.3g} GB/s a node)"
