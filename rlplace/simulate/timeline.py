"""The event simulator: action lists and durations to start times.

Deterministic, on plain arrays, compiled by numba. A lane runs its actions in order; an action
starts when its lane and its core are free and what it reads has arrived. Lanes with the same core
take turns, the earliest possible start first, ties by the smaller lane.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numba
import numpy as np
import numpy.typing as npt

from rlplace.plan.types import Action

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Orders:
    """Action lists of all lanes as flat arrays: lane l owns rows `first[l]` to `first[l + 1]`."""

    first: Ints
    stage: Ints
    backward: Ints
    micro_batch: Ints


@dataclass(frozen=True)
class Times:
    """Seconds at which each action starts and ends, in the rows of `Orders`."""

    start: Floats
    end: Floats


def orders(lanes: Sequence[Sequence[Action]]) -> Orders:
    """Action lists as arrays."""
    flat = [action for lane in lanes for action in lane]
    first = np.cumsum([0, *(len(lane) for lane in lanes)]).astype(np.int64)
    stage = np.array([action.stage for action in flat], np.int64)
    backward = np.array([action.kind == "B" for action in flat], np.int64)
    micro_batch = np.array([action.micro_batch for action in flat], np.int64)
    return Orders(first, stage, backward, micro_batch)


def simulate(
    order: Orders, forward: Floats, backward: Floats, transfer: Floats, cores: Ints
) -> Times:
    """Run the action lists.

    Args:
        order: The action lists.
        forward: Seconds of one micro-batch's forward, by stage (S,).
        backward: Seconds of its backward, by stage (S,).
        transfer: Seconds from stage s to s + 1 and back, (S - 1,).
        cores: The core of each lane (L,), numbered from 0.

    Raises:
        ValueError: If the lists cannot be run to the end (an action waits for one behind it).
    """
    start = np.zeros(len(order.stage))
    end = np.zeros(len(order.stage))
    left = _run(
        order.first,
        order.stage,
        order.backward,
        order.micro_batch,
        forward,
        backward,
        transfer,
        cores,
        start,
        end,
    )
    if left:
        raise ValueError(f"the schedule deadlocks: {left} actions can never start")
    return Times(start, end)


@numba.njit(cache=True)
def _arrival(
    is_backward: int, stage: int, micro_batch: int, done: Floats, transfer: Floats
) -> float:
    """When all that an action reads has arrived, or -1 if some of it has not been made yet."""
    own = done[0, stage, micro_batch] if is_backward else 0.0
    other = stage + 1 if is_backward else stage - 1
    if own < 0.0 or not 0 <= other < done.shape[1]:
        return own
    made = done[is_backward, other, micro_batch]
    return max(own, made + transfer[min(stage, other)]) if made >= 0.0 else -1.0


@numba.njit(cache=True)
def _run(
    first: Ints,
    stage: Ints,
    is_backward: Ints,
    micro_batch: Ints,
    forward: Floats,
    backward: Floats,
    transfer: Floats,
    cores: Ints,
    start: Floats,
    end: Floats,
) -> int:
    """Fill `start` and `end`; returns the number of actions that could not run."""
    lanes = len(first) - 1
    done = np.full((2, len(forward), micro_batch.max() + 1), -1.0)
    head = first[:-1].copy()
    lane_free = np.zeros(lanes)
    core_free = np.zeros(cores.max() + 1)
    shared = len(np.unique(cores)) < lanes
    left, lane = len(stage), 0
    idle = 0
    while left and idle < lanes:
        if shared:
            lane = _earliest(
                head,
                first,
                stage,
                is_backward,
                micro_batch,
                done,
                transfer,
                lane_free,
                core_free,
                cores,
            )
            if lane < 0:
                break
        row = head[lane]
        ready = -1.0
        if row < first[lane + 1]:
            ready = _arrival(is_backward[row], stage[row], micro_batch[row], done, transfer)
        if ready < 0.0:  # lanes with cores of their own may run ahead in any order
            lane = (lane + 1) % lanes
            idle += 1
            continue
        idle = 0
        s = stage[row]
        start[row] = max(ready, lane_free[lane], core_free[cores[lane]])
        end[row] = start[row] + (backward[s] if is_backward[row] else forward[s])
        done[is_backward[row], s, micro_batch[row]] = end[row]
        lane_free[lane] = core_free[cores[lane]] = end[row]
        head[lane] += 1
        left -= 1
    return left


@numba.njit(cache=True)
def _earliest(
    head: Ints,
    first: Ints,
    stage: Ints,
    is_backward: Ints,
    micro_batch: Ints,
    done: Floats,
    transfer: Floats,
    lane_free: Floats,
    core_free: Floats,
    cores: Ints,
) -> int:
    """The lane whose next action could start first, or -1 if none can."""
    chosen, best = -1, np.inf
    for lane in range(len(head)):
        row = head[lane]
        if row == first[lane + 1]:
            continue
        ready = _arrival(is_backward[row], stage[row], micro_batch[row], done, transfer)
        ready = max(ready, lane_free[lane], core_free[cores[lane]]) if ready >= 0.0 else np.inf
        if ready < best:
            chosen, best = lane, ready
    return chosen
