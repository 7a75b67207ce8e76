"""Action lists as arrays, in an order in which one pass can run them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from rlplace.plan.orders import Lanes, levels, split_actions

Ints = npt.NDArray[np.int64]

#: What a row does; index of its seconds in `rlplace.simulate.timeline.Durations`.
FORWARD, BACKWARD, INPUT_BACKWARD, WEIGHT_BACKWARD = range(4)


class Turns(NamedTuple):
    """Actions in an order in which whatever one reads comes before it; S stages on L lanes.

    Args:
        first: First row of each lane, and the end (L + 1,).
        turn: Turn of each row (R,).
        lane: Lane of each turn (R,).
        price: Where a turn's seconds are: ``kind * S + stage`` (R,).
        target: Turn that reads what a turn sends to another lane, or -1 (R,).
        cut: The cut between stages that this crosses (R,).
        link: The link that it takes: ``sender * L + receiver`` (R,).
        last: Turn in which each stage's last gradients of parameters are made (S,).
        reduce_first, reduce_stage: Stages of each lane in the order of `last`: those of lane l
            from `reduce_first[l]` to `reduce_first[l + 1]`; (L + 1,) and (S,).
        meets: Whether a turn's send may wait for the lane that receives it (R,); see `_meetings`.
        meet_sender, meet_reader: Turns that send and read what is passed in a meeting (K,).
        meet_before: Turn of the receiving lane before the one that reads, or -1 (K,).
        meet_due: Turn before which a meeting takes place; they are in this order (K,).
        meet_cut, meet_one, meet_other: The cut, the sending and the receiving lane (K,).
    """

    first: Ints
    turn: Ints
    lane: Ints
    price: Ints
    target: Ints
    cut: Ints
    link: Ints
    last: Ints
    reduce_first: Ints
    reduce_stage: Ints
    meets: Ints
    meet_sender: Ints
    meet_reader: Ints
    meet_before: Ints
    meet_due: Ints
    meet_cut: Ints
    meet_one: Ints
    meet_other: Ints


@dataclass(frozen=True)
class Orders:
    """Action lists of all lanes, row by row in the order of the lists, and in turns.

    Args:
        stage, kind, micro_batch: Of each row (R,); kinds are numbers of this module.
        split: Whether a stage's last gradients of parameters come from an action that makes
            nothing else (S,).
        turns: The same actions in an order in which one pass can run them.
    """

    stage: Ints
    kind: Ints
    micro_batch: Ints
    split: npt.NDArray[np.bool_]
    turns: Turns


def orders(lanes: Lanes) -> Orders:
    """Action lists as arrays.

    Raises:
        ValueError: If the lists cannot be run to the end (an action waits for one behind it).
    """
    found = levels(lanes)
    missing = sum(len(own) - len(done) for own, done in zip(lanes, found, strict=True))
    if missing:
        raise ValueError(f"the schedule deadlocks: {missing} actions can never start")
    flat = [action for lane in lanes for action in lane]
    lengths = [len(lane) for lane in lanes]
    stage = np.array([action.stage for action in flat], np.int64)
    micro_batch = np.array([action.micro_batch for action in flat], np.int64)
    kind = _kinds(lanes)
    lane = np.repeat(np.arange(len(lanes)), lengths)
    level = np.concatenate([np.array(own, np.int64) for own in found])
    row = np.argsort(level, kind="stable")
    turn = np.empty(len(row), np.int64)
    turn[row] = np.arange(len(row))
    target, cut, link = _sends(stage, kind, micro_batch, lane)
    stages = int(stage.max()) + 1
    last = np.full(stages, -1)
    gradients = np.flatnonzero((kind == BACKWARD) | (kind == WEIGHT_BACKWARD))
    np.maximum.at(last, stage[gradients], gradients)  # rows of a stage are of one lane
    own = lane[last]
    first = np.cumsum([0, *lengths]).astype(np.int64)
    sender, before = _meetings(target, level, first, stage, kind)
    meets = np.zeros(len(row), np.int64)
    meets[sender] = 1
    turns = Turns(
        first=first,
        turn=turn,
        lane=lane[row],
        price=(kind * stages + stage)[row],
        target=np.where(target >= 0, turn[target], -1)[row],
        cut=cut[row],
        link=link[row],
        last=turn[last],
        reduce_first=np.searchsorted(np.sort(own), np.arange(len(lanes) + 1)),
        reduce_stage=np.lexsort((last, own)),
        meets=meets[row],
        meet_sender=turn[sender],
        meet_reader=turn[target[sender]],
        meet_before=np.where(before >= 0, turn[before], -1),
        meet_due=np.searchsorted(level[row], level[target[sender]]),
        meet_cut=cut[sender],
        meet_one=lane[sender],
        meet_other=lane[target[sender]],
    )
    return Orders(stage, kind, micro_batch, kind[last] == WEIGHT_BACKWARD, turns)


def _meetings(target: Ints, level: Ints, first: Ints, stage: Ints, kind: Ints) -> tuple[Ints, Ints]:
    """Rows whose sends may wait for their receivers, in order, and the receivers' rows before.

    Two lanes meet when the one has run what it sends and the other all that comes before what
    reads it; the next action of the sender is then behind the receiver's action before. That is
    so in any case, or does no harm, where it is so by level; elsewhere lanes might wait for one
    another in a circle, and a send passes through a buffer.

    Meetings are in the order of the levels of what reads them, so that those of one lane are in
    the order of its list. Of equal ones gradients pass before activations, and a lane sends before
    it receives.
    """
    sender = np.flatnonzero(target >= 0)
    reader = target[sender]
    starts, ends = np.isin(reader, first[:-1]), np.isin(sender + 1, first[1:])
    before = np.where(starts, -1, reader - 1)
    following = np.where(ends, 0, sender + 1)
    free = starts | ends | (level[before] < level[following])
    sender, reader, before = sender[free], reader[free], before[free]
    forward = kind[reader] == FORWARD
    order = np.lexsort((np.where(forward, -stage[reader], stage[reader]), forward, level[reader]))
    return sender[order], before[order]


def _kinds(lanes: Lanes) -> Ints:
    apart = split_actions(lanes)
    codes = {"F": FORWARD, "B": BACKWARD, "W": WEIGHT_BACKWARD}
    return np.array(
        [
            INPUT_BACKWARD
            if action.kind == "B" and (action.stage, action.micro_batch) in apart
            else codes[action.kind]
            for lane in lanes
            for action in lane
        ],
        np.int64,
    )


def _sends(stage: Ints, kind: Ints, micro_batch: Ints, lane: Ints) -> tuple[Ints, Ints, Ints]:
    """The row that reads what a row sends (-1: none on another lane), its cut and its link."""
    stages, count, lanes = int(stage.max()) + 1, int(micro_batch.max()) + 1, int(lane.max()) + 1
    backward = ((kind == BACKWARD) | (kind == INPUT_BACKWARD)).astype(np.int64)
    sends = kind != WEIGHT_BACKWARD
    row_of = np.full((2, stages + 1, count), -1)  # the row of no stage at the end, for both sides
    row_of[backward[sends], stage[sends], micro_batch[sends]] = np.flatnonzero(sends)
    target = np.where(sends, row_of[backward, stage + 1 - 2 * backward, micro_batch], -1)
    target[lane[target] == lane] = -1
    return target, np.maximum(stage - backward, 0), lane * lanes + lane[target]
