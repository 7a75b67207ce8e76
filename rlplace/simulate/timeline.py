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


@numba.njit(cache=True)  # type: ignore[untyped-decorator]
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
    lanes, stages = len(first) - 1, len(forward)
    count = micro_batch.max() + 1 if len(micro_batch) else 0
    done = np.full((2, stages, count), -1.0)
    head = first[:-1].copy()
    lane_free = np.zeros(lanes)
    core_free = np.zeros(cores.max() + 1)
    left = len(stage)
    while left:
        chosen, best = -1, np.inf
        for lane in range(lanes):
            row = head[lane]
            if row == first[lane + 1]:
                continue
            s, m = stage[row], micro_batch[row]
            ready = 0.0
            if is_backward[row]:
                if done[0, s, m] < 0.0:
                    continue
                if s + 1 < stages:
                    if done[1, s + 1, m] < 0.0:
                        continue
                    ready = done[1, s + 1, m] + transfer[s]
            elif s > 0:
                if done[0, s - 1, m] < 0.0:
                    continue
                ready = done[0, s - 1, m] + transfer[s - 1]
            ready = max(ready, lane_free[lane], core_free[cores[lane]])
            if ready < best:
                chosen, best = lane, ready
        if chosen < 0:
            return left
        row = head[chosen]
        s = stage[row]
        finish = best + (backward[s] if is_backward[row] else forward[s])
        start[row], end[row] = best, finish
        done[is_backward[row], s, micro_batch[row]] = finish
        lane_free[chosen] = finish
        core_free[cores[chosen]] = finish
        head[chosen] += 1
        left -= 1
    return 0
