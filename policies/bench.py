"""``rlplace eval``: searches, the untrained network and the policy, equally polished."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Group, RenderableType
from rich.table import Table

from rlplace.envs.builders.stagewise import StagewiseBuilder
from rlplace.envs.instances import suite as make_suite
from rlplace.plan.types import Instance
from rlplace.planners.costing import Costing
from rlplace.planners.dynamic import dynamic
from rlplace.planners.grid import grid
from rlplace.planners.portfolio import polished
from rlplace.planners.types import Budget, Planner, PlannerResult, joined
from rlplace.policies.evaluate import Comparison, compare
from rlplace.policies.numpy_net import NumpyNet
from rlplace.policies.planner import RolloutConfig, policy_planner
from rlplace.policies.store import load_numpy_policy
from rlplace.policies.types import ScoreNetwork
from rlplace.resources import resource


@dataclass(frozen=True)
class Evaluation:
    """A comparison, and which of its instances have mixed clusters."""

    comparison: Comparison
    mixed: tuple[int, ...]
    uniform: tuple[int, ...]
    steps: int
    seed: int


def run_evaluation(
    policy: str | Path | None,
    suite: str,
    count: int,
    seed: int,
    steps: int,
    say: Callable[[str], None],
) -> Evaluation:
    """Compare on a suite.

    Args:
        policy: Folder of a policy; None for the shipped one.
        suite: Name of a suite of `rlplace.envs.instances`.
        count: Instances.
        seed: Of the suite and of all searches.
        steps: Annealing evaluations of the polish.
        say: Told which instance is at work.

    Raises:
        InputError: On an unknown suite or a damaged policy.
    """
    instances = make_suite(suite, count, seed)
    say("warming up")
    compare(rows(policy, 1), instances[:1], Budget(), seed)  # loads what numba has compiled
    comparison = compare(
        rows(policy, steps),
        instances,
        Budget(),
        seed,
        on_instance=lambda done, total: say(f"instance {done} of {total}"),
    )
    mixed = tuple(i for i, instance in enumerate(instances) if is_mixed(instance))
    uniform = tuple(i for i in range(len(instances)) if i not in mixed)
    return Evaluation(comparison, mixed, uniform, steps, seed)


def rows(policy: str | Path | None, steps: int) -> dict[str, Planner]:
    """The planners of the table, in its order; searches shared by two rows run once."""
    from rlplace.policies.network import untrained

    start = untrained()
    weights = {name: value.numpy() for name, value in start.state_dict().items()}
    nets: dict[str, ScoreNetwork] = {
        "untrained": NumpyNet(start.config, weights),
        "policy": load_numpy_policy(policy or resource("checkpoints/default")),
    }
    one = RolloutConfig(first_choices=1, samples=0)
    base: dict[str, Planner] = {"grid": remembered(grid), "dynamic": remembered(dynamic)}
    for name, net in nets.items():
        # Each row has a builder of its own: what one knows of an instance would spare the next.
        base[f"{name}, one plan"] = policy_planner(net, StagewiseBuilder(), one, name)
        base[name] = remembered(policy_planner(net, StagewiseBuilder(), name=name))
    table = base | {
        f"dynamic or grid, +{steps}": then_polish([base["grid"], base["dynamic"]], steps)
    }
    for name in nets:
        table[f"{name}, +{steps}"] = then_polish([base[name]], steps)
        table[f"{name} or grid, +{steps}"] = then_polish([base[name], base["grid"]], steps)
    return table


def remembered(planner: Planner) -> Planner:
    """A planner that answers an instance once and repeats its answer, seconds included."""
    known: dict[int, tuple[Instance, PlannerResult]] = {}

    def plan(
        instance: Instance,
        budget: Budget,
        rng: np.random.Generator,
        costing: Costing | None = None,
    ) -> PlannerResult:
        if id(instance) not in known:
            known[id(instance)] = (instance, planner(instance, budget, rng, costing))
        return known[id(instance)][1]

    return plan


def then_polish(planners: list[Planner], steps: int) -> Planner:
    """The best of some planners, annealed; its seconds are those of all of them."""

    def plan(
        instance: Instance,
        budget: Budget,
        rng: np.random.Generator,
        costing: Costing | None = None,
    ) -> PlannerResult:
        results = [planner(instance, budget, rng, costing) for planner in planners]
        return polished(instance, joined(results), Budget(evaluations=steps), rng, costing)

    return plan


def is_mixed(instance: Instance) -> bool:
    """Whether the cluster has devices of several kinds, or islands with different links."""
    return len(instance.cluster.islands) > 1


def evaluation_data(found: Evaluation) -> dict[str, Any]:
    """What `rlplace eval --json` prints."""

    def finite(value: object) -> object:
        return None if isinstance(value, float) and not math.isfinite(value) else value

    parts = {"all": None, "uniform": found.uniform, "mixed": found.mixed}
    return {
        "instances": len(found.comparison.best_known),
        "mixed": len(found.mixed),
        "seed": found.seed,
        "polish_steps": found.steps,
        "planners": {
            name: {
                part: {
                    key: finite(value)
                    for key, value in asdict(found.comparison.summary(name, chosen)).items()
                }
                for part, chosen in parts.items()
                if chosen is None or chosen
            }
            for name in found.comparison.names
        },
        "step_times": [[finite(t) for t in row] for row in found.comparison.step_times.tolist()],
    }


def render_evaluation(found: Evaluation) -> RenderableType:
    """Mean, median and worst gap, and times, over all, uniform and mixed instances."""
    shown: list[RenderableType] = []
    count = len(found.comparison.best_known)
    for title, chosen in (
        (f"all {count} instances", tuple(range(count))),
        (f"{len(found.uniform)} uniform clusters", found.uniform),
        (f"{len(found.mixed)} mixed clusters", found.mixed),
    ):
        if not chosen:
            continue
        table = Table(header_style="bold", box=None, pad_edge=False, title=title)
        for name in ("planner", "mean", "median", "worst", "failed", "s mean", "s worst"):
            table.add_column(name, justify="left" if name == "planner" else "right")
        for name in found.comparison.names:
            row = found.comparison.summary(name, chosen)
            table.add_row(
                name,
                *(f"{value:.3f}" for value in (row.mean, row.median, row.worst)),
                str(row.failed),
                f"{row.seconds_mean:.3f}",
                f"{row.seconds_worst:.3f}",
            )
        shown += [table, ""]
    return Group(*shown, "gap = ln(step time / best known); seconds are wall seconds")
