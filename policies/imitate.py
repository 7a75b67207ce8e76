"""Imitation: cross entropy between the policy and the decisions of searched plans.

Minibatches hold few distinct instances, for each costs an encoding; whole instances are held out
to decide when to stop. An epoch depends only on the seed, its number and the state before it, so
a run that is resumed between epochs equals one that was not interrupted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from rlplace.envs.types import IntArray
from rlplace.errors import InputError
from rlplace.policies.encoder import ViewBatch
from rlplace.policies.network import PlaceNet
from rlplace.policies.scorer import RowBatch
from rlplace.policies.types import ImitationConfig, Records


@dataclass
class ImitationState:
    """Where an imitation run stands; all that a checkpoint must hold beside the weights.

    Args:
        epoch: Epochs done.
        best_loss: Best held-out loss.
        best_epoch: After how many epochs it was reached.
        best: The weights of that epoch.
    """

    epoch: int = 0
    best_loss: float = float("inf")
    best_epoch: int = 0
    best: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Fit:
    """How well records are predicted.

    Args:
        loss: Mean cross entropy of a state.
        accuracy: Share of states whose most likely candidate is one of the teacher's best.
    """

    loss: float
    accuracy: float


#: Called after every epoch with the state, the training loss and the held-out fit.
EpochHook = Callable[[ImitationState, float, Fit], None]


def imitate(
    net: PlaceNet,
    optimizer: torch.optim.Optimizer,
    records: Records,
    config: ImitationConfig,
    seed: int,
    state: ImitationState | None = None,
    on_epoch: EpochHook | None = None,
) -> ImitationState:
    """Train `net` in place; it ends with the weights of the best held-out epoch.

    Args:
        net: The network.
        optimizer: Of its parameters.
        records: What to imitate.
        config: How.
        seed: Decides the held-out instances and the order of minibatches.
        state: Where an interrupted run stood.
        on_epoch: Called after every epoch: progress, logs, checkpoints.

    Raises:
        InputError: If there are no records.
    """
    if len(records) == 0:
        raise InputError("records", 0, "imitation needs at least one decision", 1)
    train, held = split(records, config.held_out, seed)
    state = state or ImitationState()
    while state.epoch < config.epochs and state.epoch - state.best_epoch < config.patience:
        rng = np.random.default_rng((seed, state.epoch))
        losses = [
            _update(net, optimizer, records, states, config.max_grad_norm)
            for states in minibatches(records, train, config, rng)
        ]
        state.epoch += 1
        fit = evaluate_fit(net, records, held, config)
        if fit.loss < state.best_loss:
            state.best_loss, state.best_epoch = fit.loss, state.epoch
            state.best = {name: value.clone() for name, value in net.state_dict().items()}
        if on_epoch is not None:
            on_epoch(state, float(np.mean(losses)), fit)
    if state.best:
        net.load_state_dict(state.best)
    return state


def split(records: Records, held_out: float, seed: int) -> tuple[IntArray, IntArray]:
    """States to train on and states to judge by, apart by instance.

    With a single instance, or `held_out` 0, it judges by what it trains on.
    """
    count = len(records.views)
    order = np.random.default_rng((seed, 0x5EED)).permutation(count)
    held = order[: int(np.ceil(held_out * count))] if count > 1 else order[:0]
    inside = np.isin(records.graph, held)
    everything = np.arange(len(records))
    if inside.all() or not inside.any():
        return everything, everything
    return everything[~inside], everything[inside]


def minibatches(
    records: Records, states: IntArray, config: ImitationConfig, rng: np.random.Generator | None
) -> Iterator[IntArray]:
    """Cut states into minibatches of few instances; without `rng`, in the given order."""
    graphs = np.unique(records.graph[states])
    if rng is not None:
        graphs = rng.permutation(graphs)
    for first in range(0, len(graphs), config.graphs_per_batch):
        chosen = graphs[first : first + config.graphs_per_batch]
        inside = states[np.isin(records.graph[states], chosen)]
        if rng is not None:
            inside = rng.permutation(inside)
        for start in range(0, len(inside), config.states_per_batch):
            yield inside[start : start + config.states_per_batch]


@torch.no_grad()
def evaluate_fit(net: PlaceNet, records: Records, states: IntArray, config: ImitationConfig) -> Fit:
    """How well the network predicts some of the records."""
    loss, right = 0.0, 0
    for batch in minibatches(records, states, config, None):
        log_probs, target, owner = _predict(net, records, batch)
        loss -= float((log_probs * target).sum())
        best_target = _largest(target, owner, len(batch))
        best_choice = _largest(log_probs, owner, len(batch))
        hit = (log_probs == best_choice[owner]) & (target == best_target[owner])
        right += int(torch.zeros(len(batch)).index_add(0, owner, hit.float()).gt(0).sum())
    return Fit(loss / len(states), right / len(states))


def _update(
    net: PlaceNet,
    optimizer: torch.optim.Optimizer,
    records: Records,
    states: IntArray,
    max_grad_norm: float,
) -> float:
    """One step of the optimizer; the mean cross entropy before it."""
    log_probs, target, _ = _predict(net, records, states)
    loss = -(log_probs * target).sum() / len(states)
    optimizer.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    torch.nn.utils.clip_grad_norm_(net.parameters(), max_grad_norm)
    optimizer.step()
    return loss.item()


def _predict(net: PlaceNet, records: Records, states: IntArray) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities, targets and owners of the rows of some states."""
    graphs = np.unique(records.graph[states]).tolist()
    rows, target = records.rows(states, {graph: slot for slot, graph in enumerate(graphs)})
    encoding = net.encoder(ViewBatch.join([records.views[graph] for graph in graphs]))
    batch = RowBatch.of(rows)
    log_probs, _ = net(encoding, batch)
    return log_probs, torch.from_numpy(target), batch.owner


def _largest(values: Tensor, owner: Tensor, count: int) -> Tensor:
    low = values.new_full((count,), -torch.inf)
    return low.scatter_reduce(0, owner, values, "amax")
