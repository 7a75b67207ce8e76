"""Which devices stages may take."""

from __future__ import annotations

from rlplace.plan.testing import chain, cluster, round_kind
from rlplace.plan.types import Instance
from rlplace.planners.costing import Costing
from rlplace.planners.takes import all_takes

_GRAPH = chain([1e9, 1e9], floats=1e3, params=10)


def _instance(counts: list[int], nodes: int = 1) -> Instance:
    kinds = [round_kind(f"kind{index}", 1.0 + index) for index in range(len(counts))]
    rows = [[kind] * count for kind, count in zip(kinds, counts, strict=True) for _ in range(nodes)]
    return Instance(_GRAPH, cluster(rows), 64)


def test_states_are_what_is_left_of_each_kind() -> None:
    (takes,) = all_takes(Costing(_instance([2, 3])).solver)
    assert len(takes.states) == 3 * 4
    assert takes.states[0] == (2, 3)
    for mesh, before, after in zip(takes.meshes, takes.before, takes.after, strict=True):
        gone = {
            device
            for line, a, b in zip(
                takes.lines, takes.states[after], takes.states[before], strict=True
            )
            for device in line[a:b]
        }
        assert set(mesh.devices) == gone


def test_stages_span_kinds_and_leave_others() -> None:
    (takes,) = all_takes(Costing(_instance([2, 2])).solver)
    taken = {mesh.devices for mesh in takes.meshes}
    assert {(0, 1), (2, 3), (1,), (0, 1, 2, 3), (1, 3)} <= taken


def test_too_many_states_become_lines_of_all_devices() -> None:
    found = list(all_takes(Costing(_instance([8, 8, 8, 8], 2)).solver))
    assert len(found) > 1
    assert all(len(takes.lines) == 1 for takes in found)
    assert all(sorted(takes.lines[0]) == list(range(64)) for takes in found)
