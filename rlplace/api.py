"""The public functions: what a user types first."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rlplace.cost.analytic import AnalyticCost
from rlplace.cost.masked import Rule, masked
from rlplace.errors import InfeasibleError, InputError, nearest_names
from rlplace.graph import library
from rlplace.plan.types import Instance, Plan
from rlplace.plan.uniform import uniform_plan
from rlplace.planners.anneal import anneal
from rlplace.planners.costing import Costing
from rlplace.planners.grid import grid
from rlplace.planners.meshes import refuse_shapeless
from rlplace.planners.remedies import shortage, smallest_changes
from rlplace.planners.replicas import data_parallel, zero3
from rlplace.planners.types import Budget, Planner, PlannerResult, best_of
from rlplace.resources import resource
from rlplace.simulate.bound import bound
from rlplace.simulate.estimate import estimate
from rlplace.simulate.types import Estimate

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import nn

    from rlplace.cluster.types import Cluster
    from rlplace.cost.measured import Calibration
    from rlplace.graph.types import OpGraph

__all__ = [
    "Placement",
    "calibrate",
    "capture",
    "estimate",
    "library",
    "place",
    "replanner",
    "shipped_policy",
    "uniform_plan",
]

#: Shares of the time limit: the policy stops at the first, the grid at the second, then the best
#: plan is annealed.
_POLICY_SHARE, _GRID_SHARE = 0.5, 0.75


@dataclass(frozen=True)
class Placement:
    """The answer to an instance.

    Args:
        plan: The best plan that was found.
        estimate: Its estimate.
        planner: Which planner found it.
        seconds: Wall seconds of the whole search.
        bound: Proved lower limit of the step time.
        alternatives: What every planner got, the winner included.
    """

    plan: Plan
    estimate: Estimate
    planner: str
    seconds: float
    bound: float
    alternatives: dict[str, PlannerResult]

    @property
    def gap(self) -> float:
        """Step time / bound - 1."""
        return self.estimate.step_time / self.bound - 1.0


def place(
    instance: Instance,
    time_limit: float = 0.25,
    policy: str | Path | None = None,
    seed: int = 0,
    planner: str | None = None,
    rules: Sequence[Rule] = (),
) -> Placement:
    """Answer an instance: the shipped policy, simple heuristics, and what local search adds.

    The answer fits and is never worse than the heuristics. The policy's own result and seconds are
    in `alternatives`, apart from the rest. Where there is time, `overlap` finds better plans.

    Args:
        instance: The question.
        time_limit: Seconds to spend, about; a first answer of each planner is always completed.
        policy: Folder of a policy; by default the shipped one.
        seed: Of the policy's samples and of the annealing.
        planner: A name of `rlplace.planners.registry.PLANNERS` that answers in their place.
        rules: What groups may do; see `rlplace.cost.masked`.

    Raises:
        InputError: If there is no such planner, if no stage can have the tp degrees that the
            instance asks for, or if a rule is for no group or allows nothing.
        InfeasibleError: If no planner found a plan that fits; says what misses by how much, and
            the smallest changes that would help.
    """
    started = time.perf_counter()
    if instance.tp_degrees is not None:
        refuse_shapeless(instance)
    rng = np.random.default_rng(seed)
    costing = Costing(instance, masked(instance, rules) if rules else AnalyticCost())
    if planner is None:
        found = _ensemble(costing, time_limit, policy, rng)
    else:
        found = {planner: _named(planner)(instance, Budget(seconds=time_limit), rng, costing)}
    best = best_of(list(found.values()))
    seconds = time.perf_counter() - started
    if best.plan is None or best.estimate is None:
        raise InfeasibleError(_no_plan(instance, best, len(rules)))
    return Placement(best.plan, best.estimate, best.planner, seconds, bound(instance), found)


def _named(planner: str) -> Planner:
    from rlplace.planners.registry import PLANNERS

    if planner not in PLANNERS:
        rule = f"must be one of {', '.join(PLANNERS)}"
        raise InputError("planner", planner, rule, nearest_names(planner, PLANNERS))
    return PLANNERS[planner]


def _ensemble(
    costing: Costing, time_limit: float, policy: str | Path | None, rng: np.random.Generator
) -> dict[str, PlannerResult]:
    """What the policy, a few heuristics, and annealing from the best of them get."""
    started, instance = time.perf_counter(), costing.instance
    found: dict[str, PlannerResult] = {}
    found["policy"] = shipped_policy(policy)(
        instance, Budget(seconds=_POLICY_SHARE * time_limit), rng, costing
    )
    for name, heuristic in (("data_parallel", data_parallel), ("zero3", zero3), ("grid", grid)):
        left = _GRID_SHARE * time_limit - (time.perf_counter() - started)
        found[name] = heuristic(instance, Budget(seconds=max(left, 0.02)), rng, costing)
    best = best_of(list(found.values()))
    start = best.plan or best.overfull
    if start is not None:
        left = max(time_limit - (time.perf_counter() - started), 0.02)
        better = anneal(instance, Budget(seconds=left), rng, start, costing)
        name = f"{best.planner}+anneal"
        found[name] = replace(better, planner=name)
    return found


def replanner(
    graph: OpGraph, cluster: Cluster, time_limit: float = 0.25, **options: Any
) -> Callable[[Plan, int], Plan]:
    """What `rlplace.run` asks for a plan when a job goes on with fewer ranks.

    Args:
        graph: The graph of the plan.
        cluster: All devices; the first ones are taken to be left.
        time_limit: As for `place`.
        options: Of the `Instance`, where they are not written in the plan.
    """

    def replan(plan: Plan, ranks: int) -> Plan:
        known = ("precision", "optimizer", "attention", "loss_chunks", "fused")
        same = {name: getattr(plan, name) for name in known}
        left = _first_devices(cluster, ranks)
        return place(Instance(graph, left, plan.global_batch, **same, **options), time_limit).plan

    return replan


def _first_devices(cluster: Cluster, count: int) -> Cluster:
    """The first devices of a cluster, without the hosts that have none of them."""
    devices = cluster.devices[:count]
    hosts = sorted({device.node for device in devices})
    return replace(
        cluster,
        devices=tuple(replace(device, node=hosts.index(device.node)) for device in devices),
        nodes=tuple(cluster.nodes[host] for host in hosts),
        overrides=tuple(one for one in cluster.overrides if max(one[:2]) < count),
    )


def shipped_policy(path: str | Path | None = None, builder: Any = None) -> Planner:
    """The planner of a policy folder (by default the one that travels with rlplace).

    Runs in numpy: torch is not imported.
    """
    from rlplace.envs.builders.stagewise import StagewiseBuilder
    from rlplace.policies.planner import policy_planner
    from rlplace.policies.store import load_numpy_policy

    net = load_numpy_policy(path or resource("checkpoints/default"))
    return policy_planner(net, builder or StagewiseBuilder())


def capture(
    module: nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    cache: bool = False,
    **options: Any,
) -> OpGraph:
    """Capture a module as an op graph; see `rlplace.graph.capture.capture`.

    Args:
        module: Any module that `torch.export` takes.
        args: Positional example inputs, of a batch of at least 2.
        kwargs: Keyword example inputs.
        cache: Keep the graph on disk, and take it from there while neither the module's source,
            nor its attributes, shapes and inputs, nor a version has changed.
        options: ``loss``, ``targets``, ``batch_dim``, ``granularity``, ``degrees``, ``name``, ...
    """
    from rlplace.graph.capture import capture as capture_module
    from rlplace.graph.user_model import capture_cached

    return (capture_cached if cache else capture_module)(module, args, kwargs, **options)


def calibrate(measurements: Any, names: Sequence[str], **options: Any) -> Calibration:
    """Fit named constants to measured plans; see `rlplace.runtime.calibrate.calibrate`."""
    from rlplace.runtime.calibrate import calibrate as fit_constants

    return fit_constants(measurements, names, **options)


def _no_plan(instance: Instance, best: PlannerResult, rules: int) -> str:
    where = f"{instance.graph.name} on {instance.cluster.name or 'this cluster'}"
    if rules:
        return f"no plan for {where} was found that fits and obeys the {rules} rules"
    lines = [f"no plan for {where} fits: {shortage(instance, best)}"]
    changes = smallest_changes(instance)
    if changes:
        lines.append("what would fit: " + "; or ".join(changes))
    return "\n".join(lines)
