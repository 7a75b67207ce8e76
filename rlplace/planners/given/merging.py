"""Ops joined to fewer, larger tasks, so that a program for tens of tasks takes a larger graph.

The edge between two tasks goes whose transfer is the longest for the work that it joins, if no
other path leads from the one to the other (the graph stays acyclic), a device may run both, and the
work of both is at most twice an even share; where no such edge is left, whatever the work is.
What a task reads arrives when the longest transfer does, since transfers run beside each other.
"""

from __future__ import annotations

import networkx as nx
import numpy as np
import numpy.typing as npt

from rlplace.cost.given.event_loop import EventArrays, Floats, Ints
from rlplace.planners.given.ranks import mean_times, mean_transfers
from rlplace.planners.given.schedule_milp import Tasks, tasks_of

#: Work of a task over an even share, at most, as long as that leaves an edge to go.
_MOST_WORK = 2.0


def merged(arrays: EventArrays, count: int) -> tuple[Tasks, Ints]:
    """Tasks in topological order, as few as `count` where that goes, and the task of each op (V,).

    Args:
        arrays: The ops.
        count: Number of tasks, at least 1.
    """
    graph, legal = _graph(arrays), np.isfinite(arrays.times)
    members = {op: [op] for op in range(arrays.ops)}
    most = _MOST_WORK * mean_times(arrays).sum() / count
    while len(graph) > count:
        edge = _heaviest(graph, legal, most)
        if edge is None and np.isinf(most):
            break
        if edge is None:
            most = np.inf
            continue
        kept, gone = edge
        legal[kept] &= legal[gone]
        members[kept] += members.pop(gone)
        _join(graph, kept, gone)
    return _tasks(arrays, graph, members)


def _graph(arrays: EventArrays) -> nx.DiGraph:
    """Ops with their work, and edges with their transfer, each the mean over the devices."""
    graph, sent = nx.DiGraph(), mean_transfers(arrays)
    for op, work in enumerate(mean_times(arrays)):
        graph.add_node(op, work=work)
    for op in range(arrays.ops):
        for edge in range(arrays.first[op], arrays.first[op + 1]):
            _put(graph, op, int(arrays.readers[0][edge]), float(sent[edge]))
    return graph


def _heaviest(
    graph: nx.DiGraph, legal: npt.NDArray[np.bool_], most: float
) -> tuple[int, int] | None:
    """The edge to go next; None if there is none."""

    def worth(edge: tuple[int, int, float]) -> tuple[float, int, int]:
        source, target, sent = edge
        work = graph.nodes[source]["work"] + graph.nodes[target]["work"]
        return -sent / max(work, 1e-300), source, target

    for source, target, _ in sorted(graph.edges(data="sent"), key=worth):
        work = graph.nodes[source]["work"] + graph.nodes[target]["work"]
        if work <= most and (legal[source] & legal[target]).any():
            if not _detour(graph, source, target):
                return source, target
    return None


def _detour(graph: nx.DiGraph, source: int, target: int) -> bool:
    """Whether another path leads from one task to the other."""
    if graph.out_degree(source) == 1 or graph.in_degree(target) == 1:
        return False
    others = (after for after in graph.successors(source) if after != target)
    return any(nx.has_path(graph, after, target) for after in others)


def _join(graph: nx.DiGraph, kept: int, gone: int) -> None:
    graph.nodes[kept]["work"] += graph.nodes[gone]["work"]
    for before, _, sent in list(graph.in_edges(gone, data="sent")):
        if before != kept:
            _put(graph, before, kept, sent)
    for _, after, sent in list(graph.out_edges(gone, data="sent")):
        _put(graph, kept, after, sent)
    graph.remove_node(gone)


def _put(graph: nx.DiGraph, source: int, target: int, sent: float) -> None:
    before = graph.get_edge_data(source, target, {"sent": 0.0})["sent"]
    graph.add_edge(source, target, sent=max(before, sent))


def _tasks(
    arrays: EventArrays, graph: nx.DiGraph, members: dict[int, list[int]]
) -> tuple[Tasks, Ints]:
    own = tasks_of(arrays)
    order = list(nx.lexicographical_topological_sort(graph))
    task_of = np.zeros(arrays.ops, np.int64)
    for task, head in enumerate(order):
        task_of[members[head]] = task
    between: dict[tuple[int, int], Floats] = {}
    for edge, ends in enumerate(zip(task_of[own.sources], task_of[own.targets], strict=True)):
        if ends[0] != ends[1]:
            key = (int(ends[0]), int(ends[1]))
            before = between.get(key, own.transfers[edge])
            between[key] = np.maximum(before, own.transfers[edge])
    pairs = np.array(list(between), np.int64).reshape(-1, 2)
    return (
        Tasks(
            times=np.array([arrays.times[members[head]].sum(axis=0) for head in order]),
            sources=pairs[:, 0],
            targets=pairs[:, 1],
            transfers=np.array(list(between.values())).reshape(-1, *[arrays.devices] * 2),
            alike=own.alike,
        ),
        task_of,
    )
