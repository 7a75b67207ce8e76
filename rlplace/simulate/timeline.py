"""The event simulator: action lists and durations to the times at which things happen.

Deterministic, on plain arrays, compiled by numba. The rules:

- A lane runs its actions in order; an action starts when its lane is free and what it reads has
  arrived. Lanes with the same core take turns, the earliest possible start first, ties by the
  smaller lane.
- A send to another lane either runs beside compute: such sends from one lane to another queue on
  the link between the two in the order in which they are made, and the two directions do not
  meet. Or it blocks: it starts when the sender has run its action and the receiver all that comes
  before the one that reads it, and both wait until it ends. Between two of its actions a lane
  passes what it sends and what it receives next at once, or in turn. A send that would wait for a
  lane that waits for the sender in turn runs beside compute, as through a buffer; so does every
  send where lanes share a core.
- The gradients of a stage become ready in buckets while its last backward runs. The buckets of a
  lane queue on a channel of its own, beside compute and sends; what cannot run beside compute
  follows after the last action and the last bucket.
- A reduction that two lanes do together starts when both have done their own.
- The optimizer of a lane comes last; those on one core take turns in the order of the lanes, after
  all actions there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numba
import numpy as np
import numpy.typing as npt

from rlplace.simulate.orders import Ints, Orders, Turns

Floats = npt.NDArray[np.float64]

#: How what crosses a cut is sent: beside compute, or blocking, both ways at once or in turn.
BESIDE, AT_ONCE, IN_TURN = range(3)

#: Rows of `Times.tails`.
LAST, REDUCED, JOINED, BEGIN, END = range(5)


class Durations(NamedTuple):
    """Seconds of what a plan does; S stages on L lanes.

    Args:
        seconds: Of one micro-batch's forward by stage, then of its whole backward, of its backward
            without parameter gradients, and of these alone (4 * S,).
        transfer: From stage s to s + 1 and back (S - 1,).
        sends: How that is sent: `BESIDE`, `AT_ONCE` or `IN_TURN` (S - 1,).
        optimizer: Of the optimizer, by lane (L,).
        bucket_first: First bucket of each stage, and the end (S + 1,).
        bucket_seconds: Of the reduction of each bucket, in the order in which they become ready.
        bucket_ready: The part of the last backward after which a bucket is ready (0 to 1).
        late: Reductions of each stage that cannot run beside compute (S,).
        joint_one, joint_other: Pairs of lanes that reduce something together (J,).
        joint_seconds: Of each such reduction (J,).
        cores: The core of each lane (L,), numbered from 0.
    """

    seconds: Floats
    transfer: Floats
    sends: Ints
    optimizer: Floats
    bucket_first: Ints
    bucket_seconds: Floats
    bucket_ready: Floats
    late: Floats
    joint_one: Ints
    joint_other: Ints
    joint_seconds: Floats
    cores: Ints


@dataclass(frozen=True)
class Times:
    """When things happen.

    Args:
        start, end: Seconds at which each action starts and ends, in the rows of `Orders` (R,).
        arrival: Seconds at which what it reads of another lane is there; 0 for nothing (R,).
        tails: Seconds at which each lane's last action ends, its own reduction has, those with
            other lanes have, its optimizer begins and ends (5, L).
    """

    start: Floats
    end: Floats
    arrival: Floats
    tails: Floats

    @property
    def seconds(self) -> float:
        """The end of the step."""
        return float(self.tails[END].max())


def simulate(order: Orders, durations: Durations) -> Times:
    """Run the action lists of one plan."""
    rows, lanes = len(order.stage), len(durations.optimizer)
    times, tails = np.empty((3, rows)), np.empty((5, lanes))
    _step(order.turns, durations, times, tails)
    start, end, arrival = times[:, order.turns.turn]
    return Times(start, end, arrival, tails)


def step_times(orders: Sequence[Orders], durations: Sequence[Durations]) -> Floats:
    """Step time of each of many plans (N,), in one compiled loop; plans may share an `Orders`."""
    distinct = {id(order): order for order in orders}
    number = {key: index for index, key in enumerate(distinct)}
    which = np.array([number[id(order)] for order in orders], np.int64)
    found = np.empty(len(which))
    turns = [order.turns for order in distinct.values()]
    _steps(
        which,
        Turns(*_joined(turns)),
        _begins(turns),
        Durations(*_joined(durations)),
        _begins(durations),
        found,
    )
    return found


def _joined(parts: Sequence[tuple[npt.NDArray[Any], ...]]) -> list[npt.NDArray[Any]]:
    """Each field of all plans, one after the other."""
    return [np.concatenate(column) for column in zip(*parts, strict=True)]


def _begins(parts: Sequence[tuple[npt.NDArray[Any], ...]]) -> Ints:
    """Where the fields of each plan begin, and the ends (N + 1, fields)."""
    begins = np.zeros((len(parts) + 1, len(parts[0])), np.int64)
    begins[1:] = np.cumsum([list(map(len, part)) for part in parts], axis=0)
    return begins


@numba.njit(cache=True)
def _steps(
    which: Ints, turns: Turns, turns_at: Ints, costs: Durations, costs_at: Ints, found: Floats
) -> None:
    """Fill in the end of each plan."""
    times = np.empty((3, (turns_at[1:, 1] - turns_at[:-1, 1]).max()))
    for plan in range(len(which)):
        a, b = turns_at[which[plan]], turns_at[which[plan] + 1]
        c, d = costs_at[plan], costs_at[plan + 1]
        tails = np.empty((5, d[3] - c[3]))
        own = Turns(
            turns.first[a[0] : b[0]],
            turns.turn[a[1] : b[1]],
            turns.lane[a[2] : b[2]],
            turns.price[a[3] : b[3]],
            turns.target[a[4] : b[4]],
            turns.cut[a[5] : b[5]],
            turns.link[a[6] : b[6]],
            turns.last[a[7] : b[7]],
            turns.reduce_first[a[8] : b[8]],
            turns.reduce_stage[a[9] : b[9]],
            turns.meets[a[10] : b[10]],
            turns.meet_sender[a[11] : b[11]],
            turns.meet_reader[a[12] : b[12]],
            turns.meet_before[a[13] : b[13]],
            turns.meet_due[a[14] : b[14]],
            turns.meet_cut[a[15] : b[15]],
            turns.meet_one[a[16] : b[16]],
            turns.meet_other[a[17] : b[17]],
        )
        paid = Durations(
            costs.seconds[c[0] : d[0]],
            costs.transfer[c[1] : d[1]],
            costs.sends[c[2] : d[2]],
            costs.optimizer[c[3] : d[3]],
            costs.bucket_first[c[4] : d[4]],
            costs.bucket_seconds[c[5] : d[5]],
            costs.bucket_ready[c[6] : d[6]],
            costs.late[c[7] : d[7]],
            costs.joint_one[c[8] : d[8]],
            costs.joint_other[c[9] : d[9]],
            costs.joint_seconds[c[10] : d[10]],
            costs.cores[c[11] : d[11]],
        )
        _step(own, paid, times, tails)
        found[plan] = tails[END].max()


@numba.njit(cache=True)
def _step(turns: Turns, costs: Durations, times: Floats, tails: Floats) -> None:
    """Fill in `times` (start, end and arrival of each turn), and `tails`."""
    start, end, arrival = times
    arrival[: len(turns.lane)] = 0.0
    shared, blocking = False, False
    for lane in range(len(costs.cores)):
        shared = shared or costs.cores[lane] != lane
    for sends in costs.sends:
        blocking = blocking or sends != BESIDE
    if shared:
        _take_turns(turns, costs, start, end, arrival, tails[LAST])
    elif blocking:
        _meet(turns, costs, start, end, arrival, tails[LAST])
    else:
        _pass(turns, costs, start, end, arrival, tails[LAST])
    _reduce(turns, costs, start, end, tails)
    _optimize(costs, tails)


@numba.njit(cache=True)
def _pass(
    turns: Turns, costs: Durations, start: Floats, end: Floats, arrival: Floats, free: Floats
) -> None:
    """Lanes with cores of their own: one pass over the turns; `free` is when each lane is done."""
    free[:] = 0.0
    link_free = np.zeros(len(free) ** 2)
    for at in range(len(turns.lane)):
        own = turns.lane[at]
        begin = free[own]
        if arrival[at] > begin:
            begin = arrival[at]
        done = begin + costs.seconds[turns.price[at]]
        start[at], end[at], free[own] = begin, done, done
        target = turns.target[at]
        if target >= 0:
            link = turns.link[at]
            if link_free[link] > done:
                done = link_free[link]
            done += costs.transfer[turns.cut[at]]
            link_free[link] = arrival[target] = done


@numba.njit(cache=True)
def _meet(
    turns: Turns, costs: Durations, start: Floats, end: Floats, arrival: Floats, free: Floats
) -> None:
    """`_pass` where sends block: a meeting takes place before the turn at which it is due."""
    free[:] = 0.0
    link_free = np.zeros(len(free) ** 2)
    rows, meetings, number = len(turns.lane), len(turns.meet_due), 0
    due = turns.meet_due[0] if meetings else rows
    for at in range(rows):
        while due <= at:
            cut = turns.meet_cut[number]
            if costs.sends[cut] != BESIDE:
                one, other = turns.meet_one[number], turns.meet_other[number]
                sender, before = turns.meet_sender[number], turns.meet_before[number]
                link = turns.link[sender]
                begin = max(end[sender], link_free[link])
                if before >= 0:
                    begin = max(begin, end[before])
                if costs.sends[cut] == IN_TURN:
                    begin = max(begin, free[one], free[other])
                done = begin + costs.transfer[cut]
                link_free[link] = arrival[turns.meet_reader[number]] = done
                free[one], free[other] = max(free[one], done), max(free[other], done)
            number += 1
            due = turns.meet_due[number] if number < meetings else rows
        own = turns.lane[at]
        begin = max(free[own], arrival[at])
        done = begin + costs.seconds[turns.price[at]]
        start[at], end[at], free[own] = begin, done, done
        target, cut = turns.target[at], turns.cut[at]
        if target >= 0 and (turns.meets[at] == 0 or costs.sends[cut] == BESIDE):
            link = turns.link[at]
            done = max(done, link_free[link]) + costs.transfer[cut]
            link_free[link] = arrival[target] = done


@numba.njit(cache=True)
def _take_turns(
    turns: Turns, costs: Durations, start: Floats, end: Floats, arrival: Floats, free: Floats
) -> None:
    """Lanes that share cores: of the next actions of all lanes, the one that can start first."""
    free[:] = 0.0
    cores, head = costs.cores, turns.first[:-1].copy()
    link_free, core_free = np.zeros(len(free) ** 2), np.zeros(cores.max() + 1)
    for at in range(len(turns.lane)):
        if turns.target[at] >= 0:
            arrival[turns.target[at]] = np.inf
    for _ in range(len(turns.lane)):
        own, begin = -1, np.inf
        for lane in range(len(head)):
            if head[lane] < turns.first[lane + 1]:
                ready = max(arrival[turns.turn[head[lane]]], free[lane], core_free[cores[lane]])
                if ready < begin:
                    own, begin = lane, ready
        at = turns.turn[head[own]]
        head[own] += 1
        done = begin + costs.seconds[turns.price[at]]
        start[at], end[at] = begin, done
        free[own] = core_free[cores[own]] = done
        target, link = turns.target[at], turns.link[at]
        if target >= 0:
            done = max(done, link_free[link]) + costs.transfer[turns.cut[at]]
            link_free[link] = arrival[target] = done


@numba.njit(cache=True)
def _reduce(turns: Turns, costs: Durations, start: Floats, end: Floats, tails: Floats) -> None:
    """When the reductions of each lane end, alone and with others."""
    for lane in range(len(costs.optimizer)):
        done, late = 0.0, 0.0
        for at in range(turns.reduce_first[lane], turns.reduce_first[lane + 1]):
            stage = turns.reduce_stage[at]
            begin, length = start[turns.last[stage]], end[turns.last[stage]]
            length -= begin
            for bucket in range(costs.bucket_first[stage], costs.bucket_first[stage + 1]):
                ready = begin + costs.bucket_ready[bucket] * length
                done = max(done, ready) + costs.bucket_seconds[bucket]
            late += costs.late[stage]
        tails[REDUCED, lane] = tails[JOINED, lane] = max(done, tails[LAST, lane]) + late
    for at in range(len(costs.joint_seconds)):
        one, other = costs.joint_one[at], costs.joint_other[at]
        done = max(tails[JOINED, one], tails[JOINED, other]) + costs.joint_seconds[at]
        tails[JOINED, one] = tails[JOINED, other] = done


@numba.njit(cache=True)
def _optimize(costs: Durations, tails: Floats) -> None:
    """When the optimizer of each lane begins and ends."""
    free = np.zeros(costs.cores.max() + 1)
    for lane in range(len(costs.cores)):
        core = costs.cores[lane]
        free[core] = max(free[core], tails[LAST, lane])
    for lane in range(len(costs.cores)):
        core = costs.cores[lane]
        tails[BEGIN, lane] = max(tails[JOINED, lane], free[core])
        tails[END, lane] = free[core] = tails[BEGIN, lane] + costs.optimizer[lane]
