"""Tests of reading Aceso's profiles."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from rlplace.cost.profiled import ProfiledCost, profile_graph, read_aceso, read_aceso_curves
from rlplace.errors import InputError
from rlplace.plan import testing
from rlplace.plan.frameworks import Framework
from rlplace.plan.types import GroupChoice, Instance, Mesh, Stage
from rlplace.plan.uniform import make_plan
from rlplace.simulate.estimate import Estimator
from rlplace.units import MIB

SHARED = Path(__file__).parents[3] / "shared/data/profiles/aceso"
HEAD = (
    "model,size,mbs,tp,algo,op_name,forward-compute,backward-compute,input_size,output_size,"
    "weights,activations,fwd_reserved,bwd_reserved\n"
)
#: Op, forward µs, weights MiB, activations MiB of one sample; backward takes twice as long.
OPS = (
    ("encoder-embedding", 10, 8, 1),
    ("enc-1st-layernorm", 20, 0, 1),
    ("enc-attention-softmax", 30, 0, 4),
    ("enc-attention-dropout", 40, 0, 6),
    ("enc-attention-dense", 50, 2, 1),
    ("enc-2nd-layernorm", 60, 0, 1),
    ("enc-MLP-GEMM-1", 70, 4, 2),
    ("final-layernorm", 80, 0, 1),
    ("gpt-post-process", 90, 8, 3),
)


def write(folder: Path, ops: Sequence[tuple[str, int, int, int]] = OPS) -> None:
    """Ops at tp 1 and 2 and 1 and 2 samples; collectives of two and four ranks."""
    lines = [
        f"gpt,toy,{b},{tp},{algo},{op},{b * t / tp},{2 * b * t / tp},{b},{b},{w / tp},{b * a},0,{b}"
        for b in (1, 2)
        for tp in (1, 2)
        for algo in (0, 1)
        for op, t, w, a in ops
    ]
    (folder / "op_profile_gpt_v100.csv").write_text(HEAD + "\n".join(lines) + "\n")
    (folder / "collectives_v100.csv").write_text(
        "model,size,collective,gpus,data_size(MB),time(ms)\n"
        "gpt,toy,all_reduce,2,4,2.0\ngpt,toy,all_reduce,2,1,1.0\ngpt,toy,all_reduce,2,8,1.5\n"
        "gpt,toy,all_gather,4,1,1.0\ngpt,toy,all_gather,4,3,3.0\n"
    )


def test_ops_are_joined_to_the_halves_of_a_layer(tmp_path: Path) -> None:
    write(tmp_path)
    profile = read_aceso(tmp_path, "toy", 2)
    assert profile.layers == (
        *("embedding", "attention", "mlp", "attention", "mlp"),
        *("norm", "head"),
    )
    attention = profile.table("V100-32", "attention", 1).at(2)
    assert attention.forward == pytest.approx(2 * 140e-6)
    assert attention.backward == pytest.approx(4 * 140e-6)
    # Softmax shares its storage with dropout, whose mask comes on top.
    assert attention.saved == pytest.approx(2 * (1 + 0 + 9 + 1) * MIB)
    assert attention.transient == 2 * MIB
    assert profile.table("V100-32", "mlp", 2).at(1).forward == pytest.approx(65e-6)
    assert profile.params["mlp", 1] == 2 * profile.params["mlp", 2] == 4 * MIB // 2
    assert profile.outputs["mlp"](2.0) == MIB  # two samples, two bytes an element
    assert profile_graph(profile).tp_degrees(4) == (1, 2)


def test_ops_are_joined_to_five_parts_where_that_is_asked(tmp_path: Path) -> None:
    ops = ("enc-attention-qkv", "enc-attention-score", "enc-MLP-GEMM-2")
    lines = [*OPS[:2], *((op, 10, 0, 1) for op in ops[:2]), *OPS[2:7], (ops[2], 10, 4, 1), *OPS[7:]]
    write(tmp_path, lines)
    profile = read_aceso(tmp_path, "toy", 2, fine=True)
    layer = ("attention", "scores", "dense", "mlp", "down")
    assert profile.layers == ("embedding", *layer, *layer, "norm", "head")
    assert profile.table("V100-32", "attention", 1).at(1).forward == pytest.approx(30e-6)
    assert profile.table("V100-32", "scores", 1).at(1).forward == pytest.approx(80e-6)
    whole = read_aceso(tmp_path, "toy", 2)
    for tp in (1, 2):
        times = [
            sum(read.table("V100-32", name, tp).at(2).backward for name in read.layers)
            for read in (profile, whole)
        ]
        assert times[0] == pytest.approx(times[1])


def test_collectives_rise_and_are_of_whole_tensors(tmp_path: Path) -> None:
    write(tmp_path)
    reduce, gather = read_aceso_curves(tmp_path, "toy")
    assert (reduce.kind, reduce.ranks) == ("all_reduce", 2)
    assert reduce.points == ((MIB, 1e-3), (4 * MIB, 2e-3), (8 * MIB, 2e-3))
    assert gather.seconds(12 * MIB) == pytest.approx(3e-3)


def test_what_is_not_there_is_refused_with_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be read"):
        read_aceso(tmp_path, "toy", 2)
    write(tmp_path)
    with pytest.raises(InputError, match="no such size") as refused:
        read_aceso(tmp_path, "toi", 2)
    assert refused.value.nearest == "toy"


@pytest.mark.skipif(not SHARED.exists(), reason="needs the published profiles")
def test_the_published_plan_of_one_gpu_costs_what_aceso_says() -> None:
    # search/single_gpu_configs/gpt_350M_mbs8_recomp.json of microsoft/SuperScaler: all but the
    # embedding and the head recomputed; 200.71 s predicted, 190.58 s measured.
    profile = read_aceso(SHARED, "350M", 24)
    graph = profile_graph(profile)
    cluster = testing.cluster([[testing.round_kind("V100-32")]])
    instance = Instance(graph, cluster, 1024, "fp16-mixed", framework=Framework("megatron"))
    redone = GroupChoice(recompute="full")
    choices = (GroupChoice(), *(redone,) * (len(graph.groups) - 2), GroupChoice())
    plan = make_plan(instance, (Stage(0, len(choices), Mesh((0,)), choices),), 128)
    found = Estimator(instance, ProfiledCost(profile)).estimate(plan)
    assert found.step_time == pytest.approx(200.71, rel=1e-3)
