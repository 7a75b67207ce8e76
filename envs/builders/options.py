"""The candidates of the stage-wise builder: which are listed, their scores and their features."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from rlplace.envs.builders.desk import FINE, ROUGH, Desk, Outlook
from rlplace.envs.types import CANDIDATE_FEATURES, MAX_CANDIDATES, Candidates

if TYPE_CHECKING:
    from rlplace.envs.builders.stagewise import Progress

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

#: Cuts that are listed for each mesh, and candidates that are listed in all.
_CUTS_A_MESH = 4
_LISTED = 64
_TINY = 1e-12
#: No feature is larger than this.
FEATURE_LIMIT = 12.0

#: What the columns of `Candidates.features` say. Logarithms are natural and clipped to +-12.
FEATURE_NAMES = (
    "score: -log(best completion seen / bound)",
    "score minus the best score of the list",
    "rank by score, over the candidates listed",
    "whether this is the first decision",
    "log(stage seconds * micro-batches / bound)",
    "log(stage seconds / slowest stage so far and ahead)",
    "log(slowest stage ahead / slowest stage so far)",
    "share of the step that is fill and drain",
    "transfers over the sum of stage seconds",
    "tail over the step",
    "memory of the stage over the limit",
    "overflow of the stage",
    "overflow of what is ahead",
    "log2(tp) / 3",
    "log2(replicas) / 6",
    "share of replicas over which states are sharded",
    "log2(micro-batches) / 8",
    "log2(samples of a micro-batch on a replica) / 8",
    "micro-batches over the depth of the pipeline, x / (1 + x)",
    "share of the remaining groups",
    "share of the remaining devices",
    "whether it finishes the pipeline",
    "log2(depth of the pipeline) / 4",
    "share of the cluster's devices that stay idle",
)
assert len(FEATURE_NAMES) == CANDIDATE_FEATURES


@dataclass(frozen=True)
class Options:
    """The candidates with what it takes to apply them.

    Args:
        candidates: What the policy sees.
        first: Of the first decision: (micro-batch count, line) of each row.
        stages: Of the others: (mesh, start cut) of each row.
        after: Of the others: the sums of `Progress` after the row, in its order, (N, 8).
    """

    candidates: Candidates
    first: tuple[tuple[int, int], ...] = ()
    stages: Ints = field(default_factory=lambda: np.zeros((0, 2), np.int64))
    after: Floats = field(default_factory=lambda: np.zeros((0, 8)))


@dataclass(frozen=True)
class _Rows:
    """Everything that the features of candidates are made of; shapes (N,).

    Args:
        total, slowest, steady, tail, depth, overflow: Of the pipeline as it would turn out.
        count: Micro-batches.
        seconds, hop, own_tail, fill, own_overflow: Of the stage itself.
        so_far, ahead: Slowest stage among those decided, and among those that the outlook sees.
        tp, dp, shard: Of the stage's mesh.
        groups, devices: Shares of what remains that the stage takes.
        idle: Share of the cluster that stays idle.
    """

    total: Floats
    slowest: Floats
    steady: Floats
    tail: Floats
    depth: Floats
    overflow: Floats
    count: Floats
    seconds: Floats
    hop: Floats
    own_tail: Floats
    fill: Floats
    own_overflow: Floats
    so_far: Floats
    ahead: Floats
    tp: Floats
    dp: Floats
    shard: Floats
    groups: Floats
    devices: Floats
    idle: Floats

    def take(self, order: Ints) -> _Rows:
        """Some of the rows."""
        return _Rows(*(getattr(self, column.name)[order] for column in fields(self)))

    def steps(self) -> Floats:
        """Step seconds as in `outlook`."""
        return np.asarray(self.total + self.steady + self.tail)

    def values(self, desk: Desk) -> Floats:
        """What the heuristic minimises: step seconds, and a price on overflow."""
        over = self.overflow
        return np.asarray(self.steps() + (over > 0.0) * desk.penalty * (1.0 + over))


def first_options(desk: Desk, refined: int) -> Options:
    """Every (micro-batch count, order of islands), judged by the outlook behind it.

    Args:
        desk: What is known about the instance.
        refined: So many of the best get a full outlook.
    """
    pairs = [(count, line) for count in desk.counts for line in range(len(desk.lines))]
    ends = [_whole(desk.outlook(count, line, ROUGH)) for count, line in pairs]
    values = _first_rows(desk, pairs, ends).values(desk)
    for index in np.argsort(values, kind="stable")[:refined]:
        count, line = pairs[index]
        ends[index] = _whole(desk.outlook(count, line, FINE))
    rows = _first_rows(desk, pairs, ends)
    values = rows.values(desk)
    order = np.argsort(values, kind="stable")[:MAX_CANDIDATES]
    features = _features(desk, rows.take(order), values[order], first=True)
    groups, hosts = len(desk.instance.graph.groups), len(desk.instance.cluster.nodes)
    spans = np.tile(np.array([0, groups, 0, hosts], np.int64), (len(order), 1))
    listed = Candidates(features, spans, _mask(rows.overflow[order]))
    return Options(listed, first=tuple(pairs[index] for index in order))


def stage_options(desk: Desk, outlook: Outlook, progress: Progress) -> Options:
    """The stages that may come before the ones decided: (mesh, start cut), best first."""
    line, stop = outlook.line, progress.stop
    meshes = np.flatnonzero(line.lasts[outlook.usable] == progress.free)
    mesh_of = np.repeat(meshes, stop)
    start_of = np.tile(np.arange(stop), len(meshes))
    hops = np.repeat(_hops(desk, outlook, progress, meshes), stop)
    rows, after = _stage_rows(desk, outlook, progress, mesh_of, start_of, hops)
    values = rows.values(desk)
    whole = int(np.argmin(np.where(start_of == 0, line.firsts[outlook.usable[mesh_of]], 1 << 30)))
    order = _shortlist(values, len(meshes), stop, whole)
    spans = _spans(desk, outlook, progress, mesh_of[order], start_of[order])
    features = _features(desk, rows.take(order), values[order], first=False)
    listed = Candidates(features, spans, _mask(rows.overflow[order]))
    chosen = np.stack([mesh_of[order], start_of[order]], axis=1)
    return Options(listed, stages=chosen, after=after[order])


def _stage_rows(
    desk: Desk,
    outlook: Outlook,
    progress: Progress,
    mesh_of: Ints,
    start_of: Ints,
    hops: Floats,
) -> tuple[_Rows, Floats]:
    """Rows of all (mesh, start) pairs, and what `Progress` adds up after each."""
    table, rest, line = outlook.table, outlook.rest, outlook.line
    numbers = outlook.usable[mesh_of]
    k = min(len(progress.stages), table.seconds.shape[1] - 1)
    own = (outlook.local[mesh_of], k, start_of, progress.stop)
    ahead = (k + 1, line.firsts[numbers], start_of)
    seconds, over = table.seconds[own], table.overflow[own]
    total = progress.total + seconds + hops
    if progress.stages:
        total = total + np.where(start_of == 0, line.tied[line.firsts[numbers]], 0.0)
    busy = seconds * line.turns[numbers]
    slowest = np.maximum(progress.slowest, busy)
    steady, excess, length = _runs(outlook, progress, busy, hops)
    joined = _hold(outlook, rest.excess[ahead] + excess, rest.length[ahead] + length)
    pair = np.where(start_of > 0, rest.edge[ahead] + busy, 0.0)
    joined = np.maximum(joined, max(0, outlook.micro_batches - 2) * pair / 2.0)
    behind = progress.tail - table.backward[own] - hops / 2.0
    tail = np.maximum(table.tail[own], behind)
    overflow = progress.overflow + over
    taken = [line.meshes[number] for number in numbers]
    left = outlook.cuts[progress.stop]
    everyone = len(line.devices)
    rows = _Rows(
        total=total + rest.total[ahead],
        slowest=np.maximum(slowest, rest.slowest[ahead]),
        steady=np.maximum(np.maximum(steady, joined), rest.steady[ahead]),
        tail=np.maximum(rest.tail[ahead], tail - rest.backward[ahead]),
        depth=len(progress.stages) + 1.0 + rest.depth[ahead],
        overflow=overflow + rest.overflow[ahead],
        count=np.full(len(mesh_of), float(outlook.micro_batches)),
        seconds=seconds,
        hop=hops,
        own_tail=table.tail[own],
        fill=table.fill[own],
        own_overflow=over,
        so_far=np.full(len(mesh_of), progress.slowest),
        ahead=rest.slowest[ahead],
        tp=np.array([float(mesh.tp) for mesh in taken]),
        dp=np.array([float(mesh.dp) for mesh in taken]),
        shard=np.array([mesh.dp_shard / mesh.dp for mesh in taken]),
        groups=(left - outlook.cuts[start_of]) / left,
        devices=(progress.free - line.firsts[numbers]) / progress.free,
        idle=np.where(start_of == 0, line.firsts[numbers] / everyone, 0.0),
    )
    return rows, np.stack([total, slowest, steady, excess, length, busy, tail, overflow], axis=1)


def _runs(
    outlook: Outlook, progress: Progress, busy: Floats, hops: Floats
) -> tuple[Floats, Floats, Floats]:
    """Steady state so far, and excess and length of the worst run that begins at each stage."""
    alone = busy - outlook.period
    joined = progress.excess + hops
    longer = bool(progress.stages) & (joined > 0.0)
    excess = alone + np.where(longer, joined, 0.0)
    length = 1.0 + np.where(longer, progress.length, 0.0)
    hold = np.maximum(_hold(outlook, alone, np.ones_like(length)), _hold(outlook, excess, length))
    if progress.stages:
        pair = busy + hops + progress.edge
        hold = np.maximum(hold, max(0, outlook.micro_batches - 2) * pair / 2.0)
    return np.maximum(progress.steady, hold), excess, length


def _hold(outlook: Outlook, excess: Floats, length: Floats) -> Floats:
    """Seconds of the steady state that runs of stages enforce (see `outlook`)."""
    left = np.maximum(0.0, outlook.micro_batches - length)
    return np.asarray(left * (outlook.period + excess / length))


def _first_rows(desk: Desk, pairs: list[tuple[int, int]], ends: list[tuple[float, ...]]) -> _Rows:
    total, slowest, steady, tail, depth, overflow = np.array(ends, float).T
    count = np.array([float(count) for count, _ in pairs])
    nothing, one = np.zeros(len(pairs)), np.ones(len(pairs))
    return _Rows(
        total=total,
        slowest=slowest,
        steady=steady,
        tail=tail,
        depth=depth,
        overflow=overflow,
        count=count,
        seconds=total / depth,
        hop=nothing,
        own_tail=tail,
        fill=nothing,
        own_overflow=nothing,
        so_far=nothing,
        ahead=slowest,
        tp=one,
        dp=one,
        shard=nothing,
        groups=one,
        devices=one,
        idle=nothing,
    )


def _whole(outlook: Outlook) -> tuple[float, ...]:
    """Total, slowest, steady, tail, depth and overflow of the best pipeline in sight."""
    at = (0, len(outlook.line.devices), len(outlook.cuts) - 1)
    rest = outlook.rest
    found = (rest.total, rest.slowest, rest.steady, rest.tail, rest.depth, rest.overflow)
    return tuple(float(array[at]) for array in found)


def _hops(desk: Desk, outlook: Outlook, progress: Progress, meshes: Ints) -> Floats:
    """Seconds there and back from each mesh to the stage that was decided last."""
    if not progress.stages:
        return np.zeros(len(meshes))
    target, count = progress.stages[-1], outlook.micro_batches
    sources = [outlook.line.meshes[outlook.usable[mesh]] for mesh in meshes]
    one_way = [desk.solver.transfer(target.start, mesh, target.mesh, count) for mesh in sources]
    return 2.0 * np.array(one_way)


def _shortlist(values: Floats, meshes: int, stop: int, whole: int) -> Ints:
    """The best cuts of each mesh, best first, and the row that places all that is left."""
    table = values.reshape(meshes, stop)
    best = np.argsort(table, axis=1, kind="stable")[:, :_CUTS_A_MESH]
    rows = (best + np.arange(meshes)[:, None] * stop).ravel()
    rows = rows[np.isfinite(values[rows])]
    rows = rows[np.argsort(values[rows], kind="stable")][:_LISTED]
    return rows if whole in rows else np.append(rows, whole)


def _mask(overflow: Floats) -> npt.NDArray[np.bool_]:
    """What fits is legal; where nothing does, everything is."""
    fits = overflow <= 0.0
    return fits if fits.any() else np.ones(len(fits), np.bool_)


def _features(desk: Desk, rows: _Rows, values: Floats, *, first: bool) -> npt.NDArray[np.float32]:
    step, number = rows.steps(), len(values)
    score = -_log(values, np.full(number, desk.bound))
    samples = desk.instance.global_batch / rows.count / rows.dp
    ratio = rows.count / np.maximum(rows.depth, 1.0)
    columns = (
        score,
        score - score.max(),
        np.arange(number) / MAX_CANDIDATES,
        np.full(number, float(first)),
        _log(rows.seconds * rows.count, np.full(number, desk.bound)),
        _log(rows.seconds, rows.slowest),
        np.where(rows.so_far * rows.ahead > 0.0, _log(rows.ahead, rows.so_far), 0.0),
        1.0 - (rows.count - 1) * rows.slowest / step,
        rows.hop / np.maximum(rows.seconds, _TINY),
        rows.own_tail / step,
        rows.fill,
        rows.own_overflow,
        rows.overflow - rows.own_overflow,
        np.log2(rows.tp) / 3.0,
        np.log2(rows.dp) / 6.0,
        rows.shard,
        np.log2(rows.count) / 8.0,
        np.log2(samples) / 8.0,
        ratio / (1.0 + ratio),
        rows.groups,
        rows.devices,
        (rows.groups >= 1.0).astype(float) * (not first),
        np.log2(np.maximum(rows.depth, 1.0)) / 4.0,
        rows.idle,
    )
    return np.asarray(np.clip(np.stack(columns, axis=1), -FEATURE_LIMIT, FEATURE_LIMIT), np.float32)


def _spans(desk: Desk, outlook: Outlook, progress: Progress, mesh_of: Ints, start_of: Ints) -> Ints:
    """(N, 4): groups, and the range of hosts that the mesh touches."""
    devices = desk.instance.cluster.devices
    found = []
    for mesh, start in zip(mesh_of, start_of, strict=True):
        hosts = {devices[d].node for d in outlook.line.meshes[outlook.usable[mesh]].devices}
        groups = (outlook.cuts[start], outlook.cuts[progress.stop])
        found.append((*groups, min(hosts), max(hosts) + 1))
    return np.array(found, np.int64)


def _log(above: Floats, below: Floats) -> Floats:
    return np.asarray(np.log(np.maximum(above, _TINY) / np.maximum(below, _TINY)))
