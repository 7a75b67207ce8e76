"""The decision process: what a builder offers, and what the policy sees of it.

A builder turns an instance into a plan by a sequence of choices among listed candidates. What is
constant during an episode (the op graph, the device graph) is `InstanceView`, encoded once; what
changes from step to step is `Candidates`. Every feature is a ratio or a logarithm of one: no
feature belongs to an op index, a device index or a physical unit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from rlplace.plan.types import Instance, Plan

FloatArray = npt.NDArray[np.float32]
IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]

#: Rows of the action space; a builder never offers more candidates than this.
MAX_CANDIDATES = 128
#: Columns of `Candidates.features`; column 0 is the heuristic score (larger is better).
CANDIDATE_FEATURES = 24
#: Columns of `InstanceView.op_features`, `.device_features` and of the edge features.
OP_FEATURES = 12
DEVICE_FEATURES = 8
EDGE_FEATURES = 3


@dataclass(frozen=True)
class InstanceView:
    """The constant part of an episode as arrays: G groups, E tensors, D hosts, L host pairs.

    Shapes: op_features (G, OP_FEATURES), op_edges (2, E), op_edge_features (E, EDGE_FEATURES),
    device_features (D, DEVICE_FEATURES), device_edges (2, L),
    device_edge_features (L, EDGE_FEATURES), globals (8,).
    """

    op_features: FloatArray
    op_edges: IntArray
    op_edge_features: FloatArray
    device_features: FloatArray
    device_edges: IntArray
    device_edge_features: FloatArray
    globals: FloatArray


@dataclass(frozen=True)
class Candidates:
    """What may be decided next: N rows.

    Args:
        features: (N, CANDIDATE_FEATURES); column 0 is the heuristic score.
        spans: (N, 4): first and last + 1 group, first and last + 1 host that the candidate
            covers, so that the scorer can pool the encodings of just these.
        mask: (N,): False where the candidate is illegal (it stays listed, it is never chosen).
    """

    features: FloatArray
    spans: IntArray
    mask: BoolArray


class Builder(Protocol):
    """A sequential decision process that builds a plan. Its states are immutable."""

    def start(self, instance: Instance, rng: np.random.Generator | None = None) -> Any:
        """The first state; `rng` permutes symmetric devices (None: the given order)."""
        ...

    def view(self, state: Any) -> InstanceView:
        """The constant part, in the state's own device order."""
        ...

    def candidates(self, state: Any) -> Candidates:
        """What may be decided next; at least one row is unmasked unless the state is done."""
        ...

    def apply(self, state: Any, index: int) -> Any:
        """The state after choosing a candidate."""
        ...

    def done(self, state: Any) -> bool:
        """Whether the plan is complete."""
        ...

    def plan(self, state: Any) -> Plan:
        """The plan of a complete state."""
        ...
