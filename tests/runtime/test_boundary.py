from __future__ import annotations

import functools

from rlplace.graph.library import Argument, build, spec
from rlplace.graph.neighbours import sequence_layouts
from rlplace.graph.program import Program, export_program
from rlplace.graph.types import OpGraph, Shard
from rlplace.plan.types import GroupChoice, Instance, Mesh, Plan, Stage
from rlplace.plan.uniform import make_plan
from rlplace.runtime.boundary import Form, borders, forms, stage_of
from rlplace.runtime.validate import stand_in_cluster

MODEL: dict[str, Argument] = {
    "layers": 4,
    "hidden": 32,
    "heads": 4,
    "kv_heads": 2,
    "ffn": 64,
    "vocab": 96,
    "seq_len": 8,
}
WHOLE, BY_CP, BY_TP = Form(), Form(cp=Shard(1)), Form(tp=Shard(1))


@functools.cache
def made() -> tuple[OpGraph, Program]:
    wanted = spec("llama", **MODEL)  # type: ignore[arg-type]  # as below
    example = wanted.example(2)
    assert isinstance(example, dict)
    graph = build("llama", **MODEL)  # type: ignore[arg-type]  # seq_len and others are in MODEL
    return graph, export_program(wanted.make().train(), (), example)


def forms_of(*meshes: Mesh, sequence: bool = False) -> list[set[Form]]:
    """Of the float tensors of each stage of an even split."""
    graph, program = made()
    count = len(meshes)
    bounds = [round(i * len(graph.groups) / count) for i in range(count + 1)]
    stages = []
    for index, mesh in enumerate(meshes):
        groups = range(bounds[index], bounds[index + 1])
        names = ["replicate"] * len(groups)
        if sequence and mesh.tp > 1:
            layouts = sequence_layouts(graph, mesh.tp)
            names = [layouts[group].name for group in groups]
        choices = tuple(GroupChoice(name) for name in names)
        stages.append(Stage(groups.start, groups.stop, mesh, choices))
    instance = Instance(graph, stand_in_cluster(8), 8, precision="fp32")
    plan: Plan = make_plan(instance, tuple(stages), 1)
    crossing = borders(program, stage_of(graph, plan), count)
    found = forms(graph, plan, crossing)
    crossed = [{n.name for n in nodes} for nodes in crossing]
    for index, names_of in enumerate(crossed):
        assert names_of <= found[index].keys() & found[index + 1].keys()
    return [
        {own[name] for name in set().union(*crossed[max(0, i - 1) : i + 1])}
        for i, own in enumerate(found)
    ]


def test_whole_layouts_hand_whole_tensors_on() -> None:
    assert forms_of(Mesh((0, 1), tp=2), Mesh((2, 3), dp_replicate=2)) == [{WHOLE}, {WHOLE}]


def test_sequences_stay_cut_over_a_border() -> None:
    pair = forms_of(Mesh((0, 1), tp=2), Mesh((2, 3), tp=2), sequence=True)
    assert pair == [{BY_TP}, {BY_TP}]


def test_each_stage_has_the_form_of_its_own_axis() -> None:
    found = forms_of(Mesh((0, 1), tp=2), Mesh((2,)), Mesh((3, 4), cp=2), sequence=True)
    assert found == [{BY_TP}, {WHOLE}, {BY_CP}]


def test_both_axes_of_a_mesh_cut_a_sequence() -> None:
    found = forms_of(Mesh((0, 1, 2, 3), cp=2, tp=2), Mesh((4, 5), cp=2), sequence=True)
    assert found == [{Form(Shard(1), Shard(1))}, {BY_CP}]
    whole = forms_of(Mesh((0, 1, 2, 3), cp=2, tp=2), Mesh((4, 5), tp=2))
    assert whole == [{BY_CP}, {WHOLE}]
