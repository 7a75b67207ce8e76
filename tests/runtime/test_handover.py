from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from rlplace.errors import InputError
from rlplace.graph.capture import capture
from rlplace.graph.program import export_program
from rlplace.graph.types import OpGraph
from rlplace.plan.types import GroupChoice, Instance, Mesh, Plan, Stage
from rlplace.plan.uniform import make_plan
from rlplace.runtime.handover import handovers
from rlplace.runtime.validate import stand_in_cluster, validate
from tests.runtime.reference import graph_of
from tests.runtime.test_ordered import Ranked, mixtral

#: The first group behind the sort of the tokens.
EXPERTS = 4


def plan_of(graph: OpGraph, *stages: tuple[int, int]) -> Plan:
    """Stages of (first group, dp)."""
    instance = Instance(graph, stand_in_cluster(4), 4, precision="fp32")
    bounds = [*(start for start, _ in stages), len(graph.groups)]
    made, device = [], 0
    for (start, stop), (_, dp) in zip(pairwise(bounds), stages, strict=True):
        mesh = Mesh(tuple(range(device, device + dp)), dp)
        made.append(Stage(start, stop, mesh, (GroupChoice(),) * (stop - start)))
        device += dp
    return make_plan(instance, tuple(made), 1)


def test_between_equal_meshes_rows_cross_in_their_order() -> None:
    graph = graph_of("mixtral")
    (border,) = handovers(mixtral(), graph, plan_of(graph, (0, 2), (EXPERTS, 2)))
    assert not border.sortings
    assert set(border.names) == {*graph.reads(EXPERTS)}
    assert all(name == crossed for name, crossed in border.names.items())


def test_rows_cross_by_sample_with_what_was_sorted() -> None:
    graph = graph_of("mixtral")
    plan = plan_of(graph, (0, 1), (3, 1), (EXPERTS, 2))
    before, border = handovers(mixtral(), graph, plan)
    assert not before.sortings, "nothing is sorted yet"
    (sorting,) = border.sortings
    assert (sorting.rows, sorting.numbers) == (("mul_14",), ("cumsum",))
    assert border.tensors["mul_14"] == "mul_14 by sample"
    # The places and the numbers of rows are those of other rows there: they do not cross.
    assert set(border.names) == {"mul_14", "div_", "to_6", sorting.key}


def test_each_rank_gives_its_own_rows_an_order() -> None:
    graph = graph_of("mixtral")
    (border,) = handovers(mixtral(), graph, plan_of(graph, (0, 1), (EXPERTS, 2)))
    (sorting,) = border.sortings
    key, tokens = torch.randint(8, (32,)), torch.arange(32.0).unsqueeze(1)
    undone = sorting.undone(mixtral(), "cpu")
    (back,) = undone.module(key, tokens[key.sort().indices])
    assert torch.equal(back, tokens)
    done = sorting.done(mixtral(), "cpu")
    for own in (slice(0, 20), slice(20, 32)):
        found = dict(zip(done.writes, done.module(key[own], back[own]), strict=True))
        assert torch.equal(found["mul_14"], tokens[own][key[own].sort().indices])
        assert found["cumsum"].tolist() == key[own].bincount(minlength=8).cumsum(0).tolist()


def test_an_order_that_cannot_be_undone_is_refused() -> None:
    example = {"x": torch.zeros(2, 3)}
    for kind, message in (("", ""), ("running", "cumsum is in an order of all tokens")):
        program, graph = (
            export_program(Ranked(kind), (), example),
            capture(Ranked(kind), (), example),
        )
        cut = len(graph.groups) - 1
        validate(plan_of(graph, (0, 2), (cut, 2)), graph, program, 4)
        if not message:
            validate(plan_of(graph, (0, 2), (cut, 1)), graph, program, 4)
            continue
        with pytest.raises(InputError, match=message):
            validate(plan_of(graph, (0, 2), (cut, 1)), graph, program, 4)
