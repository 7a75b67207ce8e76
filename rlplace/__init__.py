"""rlplace: learned placement and sharding of PyTorch models over device graphs."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from rlplace.envs.registration import register

if TYPE_CHECKING:
    from rlplace.api import calibrate, capture, estimate, library, place, replanner, uniform_plan
    from rlplace.cluster.types import Cluster
    from rlplace.graph.types import OpGraph
    from rlplace.plan.types import Instance, Plan
    from rlplace.runtime.export import export_weights
    from rlplace.training import Trainer, run

__version__ = "0.1.0"

# So that `import rlplace` is all that `gymnasium.make("rlplace/Place-v0")` needs.
register()

_HOMES = {
    "Cluster": "rlplace.cluster.types",
    "Instance": "rlplace.plan.types",
    "OpGraph": "rlplace.graph.types",
    "Plan": "rlplace.plan.types",
    "Trainer": "rlplace.training",
    "calibrate": "rlplace.api",
    "capture": "rlplace.api",
    "estimate": "rlplace.api",
    "export_weights": "rlplace.runtime.export",
    "library": "rlplace.api",
    "place": "rlplace.api",
    "replanner": "rlplace.api",
    "run": "rlplace.training",
    "uniform_plan": "rlplace.api",
}

__all__ = [
    "Cluster",
    "Instance",
    "OpGraph",
    "Plan",
    "Trainer",
    "calibrate",
    "capture",
    "estimate",
    "export_weights",
    "library",
    "place",
    "replanner",
    "run",
    "uniform_plan",
]


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used, so that `import rlplace` costs nothing."""
    if name not in _HOMES:
        raise AttributeError(f"module 'rlplace' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
