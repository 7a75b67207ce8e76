from rlplace.report.folds import Run, joint_name, runs, shown_names
from tests.report.graphs import graph, layered_model, unet


def test_equal_layers_are_one_run_and_cover_every_group_once() -> None:
    found = runs(layered_model(6))
    assert found == [Run(0), Run(1, 2, 6), Run(13)]
    assert list(found[1].members(1)) == [2, 4, 6, 8, 10, 12]
    assert runs(layered_model(6), fold=False) == [Run(i) for i in range(14)]


def test_a_layer_with_a_skip_connection_of_its_own_stays_apart() -> None:
    found = runs(layered_model(6, skip_from=2))
    covered = [g for run in found for o in range(run.period) for g in run.members(o)]
    assert sorted(covered) == list(range(14))
    # Layer 2 writes to the head: it may end a run, never be inside of one.
    assert Run(1, 2, 3) in found
    assert Run(7, 2, 3) in found


def test_layers_of_a_way_down_that_all_write_elsewhere_are_not_one() -> None:
    assert all(run.count == 1 for run in runs(unet(4)))
    names = [*(f"d.{i}" for i in range(3)), "middle", *(f"u.{i}" for i in range(3))]
    skips = [(0, 6), (1, 5), (2, 4)]
    chain = [(i, i + 1) for i in range(6)]
    same = graph(names, [0, 0, 0, 1, 2, 2, 2], chain + skips)
    assert all(run.count == 1 for run in runs(same))
    assert [run.count for run in runs(graph(names, [0, 0, 0, 1, 2, 2, 2], chain))] == [3, 1, 3]


def test_layers_that_all_read_and_write_the_same_outside_are_one_run() -> None:
    names = ["memory", "embed", *(f"l.{i}" for i in range(4)), "loss"]
    edges = [(i, i + 1) for i in range(1, 6)] + [(0, i) for i in range(2, 6)]
    edges += [(i, 6) for i in range(2, 5)]  # router losses; the last layer writes there anyway
    assert runs(graph(names, [0, 1, 2, 2, 2, 2, 3], edges)) == [
        Run(0),
        Run(1),
        Run(2, 1, 4),
        Run(6),
    ]
    fewer = [edge for edge in edges if edge != (0, 4)]
    assert Run(2, 1, 4) not in runs(graph(names, [0, 1, 2, 2, 2, 2, 3], fewer))


def test_other_names_are_another_run() -> None:
    names = ["a.0", "a.1", "b.0", "b.1"]
    found = runs(graph(names, [0, 0, 0, 0], [(0, 1), (1, 2), (2, 3)]))
    assert found == [Run(0, 1, 2), Run(2, 1, 2)]


def test_names_that_differ_in_numbers_become_one() -> None:
    assert joint_name(["head"]) == "head"
    assert joint_name([f"h.{i}.mlp" for i in range(12)]) == "h.0-11.mlp"
    assert joint_name([f"l.{i}.attn" for i in range(0, 8, 2)]) == "l.0,2..6.attn"
    assert joint_name(["s.0.b.1", "s.0.b.2", "s.1.b.0"]) == "s.0-1.b.0-2"
    assert joint_name(["l.3", "l.5"]) == "l.3,5"


def test_a_first_part_is_dropped_only_where_all_names_have_it() -> None:
    plain = [(0, 1), (1, 2)]
    assert shown_names(graph(["m.a", "m.b", "head"], [0, 1, 2], plain)) == ["a", "b", "head"]
    towers = ["encoder.a", "decoder.a", "decoder.b"]
    assert shown_names(graph(towers, [0, 1, 2], plain)) == towers
