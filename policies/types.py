"""What the rooms of the agent hand to each other: plain numpy data, without torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from rlplace.envs.types import (
    CANDIDATE_FEATURES,
    DEVICE_FEATURES,
    EDGE_FEATURES,
    OP_FEATURES,
    BoolArray,
    Candidates,
    FloatArray,
    InstanceView,
    IntArray,
)

#: Version of the network's arithmetic and parameter names; files of another one are refused.
NETWORK_VERSION = 1
#: Entries of `InstanceView.globals`.
GLOBAL_FEATURES = 8
#: Columns of `step_features`.
STEP_FEATURES = 2

DoubleArray = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class NetConfig:
    """The shape of a network; all that is needed to build it before its weights are read.

    Args:
        width: Width of every embedding.
        rounds: Rounds of message passing on each graph.
        heads: Heads of the attention between the two graphs; divides `width`.
        scale: Factor of the heuristic score in the untrained network (the inverse temperature of
            its softmax); learnable afterwards.
        op_features: Columns of the op features it was built for.
        device_features: Columns of the device features.
        edge_features: Columns of the edge features of both graphs.
        global_features: Entries of the global features.
        candidate_features: Columns of the candidate features.
    """

    width: int = 64
    rounds: int = 3
    heads: int = 4
    scale: float = 30.0
    op_features: int = OP_FEATURES
    device_features: int = DEVICE_FEATURES
    edge_features: int = EDGE_FEATURES
    global_features: int = GLOBAL_FEATURES
    candidate_features: int = CANDIDATE_FEATURES


@dataclass(frozen=True)
class ImitationConfig:
    """How to imitate.

    Args:
        epochs: Passes over the records, at most.
        learning_rate: Of Adam.
        graphs_per_batch: Distinct instances in a minibatch.
        states_per_batch: States in a minibatch, at most.
        held_out: Share of the instances on which learning is judged.
        patience: Epochs without a better held-out loss after which to stop.
        max_grad_norm: Gradients are clipped to this norm.
    """

    epochs: int = 40
    learning_rate: float = 1e-3
    graphs_per_batch: int = 8
    states_per_batch: int = 256
    held_out: float = 0.1
    patience: int = 8
    max_grad_norm: float = 1.0


@dataclass(frozen=True)
class Rows:
    """The legal candidates of B states, one below the other: M rows. Only these are scored.

    Args:
        features: (M, CANDIDATE_FEATURES).
        spans: (M, 4), as in `Candidates.spans`.
        owner: (M,): the state that each row belongs to, 0 to B - 1, ascending.
        index: (M,): its index among all candidates of that state, legal or not.
        step: (B,): how many decisions were taken before.
        graph: (B,): which of the encoded instances the state belongs to.
    """

    features: FloatArray
    spans: IntArray
    owner: IntArray
    index: IntArray
    step: IntArray
    graph: IntArray

    @staticmethod
    def gather(candidates: Sequence[Candidates], step: IntArray, graph: IntArray) -> Rows:
        """The legal rows of several states."""
        legal = [np.flatnonzero(state.mask) for state in candidates]
        counts = [len(rows) for rows in legal]
        return Rows(
            np.concatenate([s.features[i] for s, i in zip(candidates, legal, strict=True)]),
            np.concatenate([s.spans[i] for s, i in zip(candidates, legal, strict=True)]),
            np.repeat(np.arange(len(candidates)), counts),
            np.concatenate(legal),
            step,
            graph,
        )


def step_features(step: IntArray) -> FloatArray:
    """(B, STEP_FEATURES) of the number of decisions taken: bounded, fine where it is small."""
    late = np.log1p(step) / 4.0
    first = 1.0 / (1.0 + step)
    return np.stack([late, first], axis=1).astype(np.float32)


def distinct(ids: IntArray) -> tuple[IntArray, IntArray]:
    """Distinct ids in the order in which they come, and for each id which of them it is.

    The order does not depend on the numbers themselves: two processes that count instances
    differently compute the same.
    """
    flat = ids.reshape(-1)
    _, first, inverse = np.unique(flat, return_index=True, return_inverse=True)
    order = np.argsort(first)
    return flat[first[order]], np.argsort(order)[inverse.reshape(-1)]


class ScoreNetwork(Protocol):
    """What planning needs of a network, whichever library computes it."""

    def encode(self, view: InstanceView) -> Any:
        """The encoding of an instance: computed once, handed back to `score`."""
        ...

    def score(self, encoding: Any, candidates: Sequence[Candidates], step: int) -> list[FloatArray]:
        """Log-probabilities of the candidates of several states of one instance.

        Args:
            encoding: What `encode` gave.
            candidates: One entry a state.
            step: Number of decisions taken before, the same for all the states.

        Returns:
            For each state one entry a candidate; minus infinity where it is illegal.
        """
        ...


class ViewBank(Protocol):
    """A mapping from instance ids to their views: what observations refer to."""

    def view(self, instance: int) -> InstanceView:
        """The constant part of an episode."""
        ...


@dataclass(frozen=True)
class Records:
    """Decisions to imitate: R states, their candidates one below the other (N rows).

    Args:
        views: The constant parts, one an instance.
        graph: (R,): index into `views`.
        step: (R,): decisions taken before.
        starts: (R + 1,): rows ``starts[r]`` to ``starts[r + 1]`` belong to state r.
        features: (N, CANDIDATE_FEATURES) of legal candidates.
        spans: (N, 4).
        target: (N,): probabilities that sum to one over a state's rows.
    """

    views: tuple[InstanceView, ...]
    graph: IntArray
    step: IntArray
    starts: IntArray
    features: FloatArray
    spans: IntArray
    target: FloatArray

    def __len__(self) -> int:
        """The number of states."""
        return len(self.step)

    def rows(self, states: IntArray, slot: dict[int, int]) -> tuple[Rows, FloatArray]:
        """Rows and targets of some states.

        Args:
            states: Which states.
            slot: Where in the batch of encoded instances each view lies.
        """
        spans = [np.arange(self.starts[s], self.starts[s + 1]) for s in states]
        take = np.concatenate(spans)
        owner = np.repeat(np.arange(len(states)), [len(span) for span in spans])
        graph = np.array([slot[int(g)] for g in self.graph[states]], dtype=np.int64)
        index = take - self.starts[states][owner]
        rows = Rows(self.features[take], self.spans[take], owner, index, self.step[states], graph)
        return rows, self.target[take]

    @staticmethod
    def join(parts: Sequence[Records]) -> Records:
        """All states of several sets of records; views are kept apart."""
        views = [len(part.views) for part in parts]
        first_view = np.cumsum([0, *views])
        sizes = np.concatenate([np.diff(part.starts) for part in parts])
        return Records(
            tuple(view for part in parts for view in part.views),
            np.concatenate([p.graph + f for p, f in zip(parts, first_view[:-1], strict=True)]),
            np.concatenate([part.step for part in parts]),
            np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64),
            np.concatenate([part.features for part in parts]),
            np.concatenate([part.spans for part in parts]),
            np.concatenate([part.target for part in parts]),
        )


@dataclass
class Recorder:
    """Collects the decisions of one instance and turns them into `Records`."""

    view: InstanceView
    steps: list[int] = field(default_factory=list)
    features: list[FloatArray] = field(default_factory=list)
    spans: list[IntArray] = field(default_factory=list)
    targets: list[FloatArray] = field(default_factory=list)

    def add(self, candidates: Candidates, step: int, target: FloatArray) -> None:
        """One state; `target` (N,) has its weight on legal candidates only."""
        legal: BoolArray = candidates.mask
        assert not target[~legal].any(), "a target on an illegal candidate"
        self.steps.append(step)
        self.features.append(candidates.features[legal])
        self.spans.append(candidates.spans[legal])
        self.targets.append((target[legal] / target[legal].sum()).astype(np.float32))

    def choose(self, candidates: Candidates, step: int, index: int) -> None:
        """One state in which candidate `index` was chosen."""
        target = np.zeros(len(candidates.mask), dtype=np.float32)
        target[index] = 1.0
        self.add(candidates, step, target)

    def records(self) -> Records:
        """All that was added, which may be nothing."""
        sizes = [len(rows) for rows in self.features]
        return Records(
            (self.view,),
            np.zeros(len(self.steps), dtype=np.int64),
            np.array(self.steps, dtype=np.int64),
            np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64),
            np.concatenate([np.zeros((0, CANDIDATE_FEATURES), np.float32), *self.features]),
            np.concatenate([np.zeros((0, 4), np.int64), *self.spans]),
            np.concatenate([np.zeros(0, np.float32), *self.targets]),
        )
