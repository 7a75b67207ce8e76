import json

import pytest
from rich.console import Console

from rlplace.errors import InputError
from rlplace.graph.types import Affine, Collective, Layout, Work
from rlplace.report.graph_view import graph_data, group_rows, layout_rows, render_graph
from tests.report.graphs import graph, layered_model, sharded


def test_rows_give_the_figures_of_one_group() -> None:
    rows = group_rows(layered_model(6), "bf16-mixed")
    assert [(row.name, row.count) for row in rows] == [
        ("embed", 1),
        ("layers.0-5.attn", 6),
        ("layers.0-5.mlp", 6),
        ("head", 1),
    ]
    mlp = rows[2]
    assert (mlp.ops, mlp.params, mlp.flops, mlp.backward_flops) == (2, 112, 3.0, 6.0)
    assert mlp.saved == 8 * 2 + 3
    assert group_rows(layered_model(6), "fp32")[2].saved == 8 * 4 + 3
    assert rows[1].reads == ("embed", "layers.0-5.mlp")
    assert mlp.groups == (2, 4, 6, 8, 10, 12)
    assert len(group_rows(layered_model(6), fold=False)) == 14


def test_degrees_with_equal_collectives_share_a_row() -> None:
    gather = Layout("shard", 8, Work(), (Collective("all_gather", "forward", Affine(0.0, 0.5)),))
    layouts = (sharded(2, 1, 1), sharded(4, 1, 1), sharded(4, 2, 3), sharded(8, 1, 1), gather)
    made = graph(["a"], [0], [], layouts={0: layouts})
    rows = layout_rows(made.structures[0])
    assert [(row.degrees, row.forward, row.backward) for row in rows] == [
        ((2, 4), {"all_reduce": 1}, {"all_reduce": 1}),
        ((8,), {"all_gather": 1}, {}),
    ]


def test_data_is_json_and_adds_up() -> None:
    made = layered_model(6)
    rows = group_rows(made)
    data = json.loads(json.dumps(graph_data(made, "bf16-mixed", rows)))
    assert data["groups"] == 14
    assert data["distinct"] == 4
    assert data["flops"] == sum(
        row["count"] * (row["flops"] + row["backward_flops"]) for row in data["rows"]
    )
    assert data["saved_bytes"] == 14 * 19
    assert data["ops"] == sum(row["count"] * row["ops"] for row in data["rows"]) == 28


def test_the_table_fits_eighty_columns_and_explains_its_words() -> None:
    layouts: dict[int, tuple[Layout, ...]] = {1: (sharded(2, 1, 1), sharded(4, 1, 1))}
    names = [*(f"encoder.block.{i}.layer.0.SelfAttention" for i in range(3)), "head"]
    made = graph(names, [1, 1, 1, 0], [(0, 1), (1, 2), (2, 3)], layouts=layouts)
    console = Console(width=80, record=True, file=open("/dev/null", "w"))
    console.print(render_graph(made, "bf16-mixed", group_rows(made)))
    text = console.export_text()
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= 80
    for words in ("x3", "2,4: 1 AR", "AR all-reduce", "4 groups, 2 distinct"):
        assert words in " ".join(text.split())


def test_an_unknown_precision_is_refused() -> None:
    with pytest.raises(InputError, match="bf16-mixed"):
        group_rows(layered_model(2), "bf16mixed")
