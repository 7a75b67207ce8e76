from __future__ import annotations

import json
import sys
from pathlib import Path

import onnx
import pytest
import torch
from onnx import TensorProto, helper
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from rlplace.api import place
from rlplace.cli import main
from rlplace.cluster.types import Cluster
from rlplace.errors import InputError, MissingExtraError
from rlplace.graph.cache import load_graph, store_graph
from rlplace.graph.capture import capture
from rlplace.graph.formats.onnx_graph import read_onnx
from rlplace.graph.formats.read import read_graph, read_model
from rlplace.graph.types import Affine, OpGraph
from rlplace.plan.types import Instance
from tests.graph.formats.onnx_files import ConvNet, Transformer, export, write

IDS = torch.randint(0, 50, (2, 8))


class MeanLoss(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = self.module(x).mean()
        return loss


def named(graph: OpGraph) -> list[tuple[str, int]]:
    return [(group.name, group.structure) for group in graph.groups]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("onnx")


@pytest.fixture(scope="module")
def transformer(folder: Path) -> Path:
    return export(Transformer(), IDS, folder / "transformer.onnx", {0: "batch"})


@pytest.fixture(scope="module")
def conv_net(folder: Path) -> Path:
    image = torch.randn(2, 3, 16, 16)
    return export(ConvNet(), image, folder / "conv.onnx", {0: "batch"})


def test_parameters_and_flops_of_a_conv_net_equal_the_module(conv_net: Path) -> None:
    graph = read_onnx(conv_net)
    module = ConvNet()
    assert graph.params == sum(p.numel() for p in module.parameters())
    for batch in (1, 5):
        with FlopCounterMode(display=False) as counter:
            module(torch.randn(batch, 3, 16, 16)).sum().backward()
        assert graph.model_flops(batch) == counter.get_total_flops()


def test_a_conv_net_costs_what_its_capture_costs(conv_net: Path) -> None:
    image = torch.randn(2, 3, 16, 16)
    captured = capture(MeanLoss(ConvNet()), (image,), degrees=())
    graph = read_onnx(conv_net)
    assert graph.model_flops == captured.model_flops
    for batch in (1, 8):
        for field in ("flops", "backward_flops", "saved"):
            one, two = (
                sum(getattr(g.structure(i).work, field)(batch) for i in range(len(g.groups)))
                for g in (graph, captured)
            )
            assert one == two, field


def test_groups_of_a_conv_net(conv_net: Path) -> None:
    graph = read_onnx(conv_net)
    # The two branches of the skip stay together.
    assert [group.name for group in graph.groups] == ["first", "second", "head"]
    assert [edge.floats for edge in graph.edges] == [
        Affine(0.0, 8 * 16 * 16),
        Affine(0.0, 8 * 4 * 4),
    ]
    assert graph.groups[1].params == ("second.weight", "second.bias")


def test_a_transformer_becomes_layers_that_share_structures(transformer: Path) -> None:
    graph = read_onnx(transformer)
    module = Transformer()
    assert graph.params == sum(p.numel() for p in module.parameters())
    assert graph.tokens_per_sample == 8
    assert graph.tied == ()
    names = [group.name for group in graph.groups]
    halves = [f"layers.{i}{half}" for i in range(3) for half in ("", "#2")]
    assert names == ["emb", *halves, "head"]
    assert [group.structure for group in graph.groups] == [0, 1, 2, 1, 2, 1, 2, 3]
    assert all(edge.floats == Affine(0.0, 8 * 32) for edge in graph.edges)
    # Forward: the linear layers, and two products of 8 x 8 x 32 in the attention.
    linear = 2 * 8 * (3 * 12 * 32 * 32 + 32 * 50)
    flops = [graph.structure(group.index).work.flops for group in graph.groups]
    assert sum(f(1) for f in flops) == linear + 3 * 2 * 2 * 8 * 8 * 32
    assert graph.model_flops == Affine(0.0, 3 * sum(f(1) for f in flops))


def test_saved_tensors_of_the_mlp_are_those_of_autograd(transformer: Path) -> None:
    graph = read_onnx(transformer)
    # Of each token: the input of the norm, of both linear layers, and of the activation function.
    work = graph.structure(2).work
    assert work.saved == Affine(0.0, 8 * (32 + 32 + 128 + 128))
    assert work.params == 64 + 32 * 128 + 128 + 128 * 32 + 32


def test_the_older_exporter_gives_the_same_graph(transformer: Path, folder: Path) -> None:
    older = export(Transformer(), IDS, folder / "older.onnx", {0: "batch"}, legacy=True)
    one, two = read_onnx(transformer), read_onnx(older)
    assert named(one) == named(two)
    assert one.model_flops == two.model_flops
    assert one.params == two.params
    for a, b in zip(one.structures, two.structures, strict=True):
        assert (a.work.saved, a.work.moved) == (b.work.saved, b.work.moved)


def test_a_named_sequence_needs_a_size(folder: Path, transformer: Path) -> None:
    path = export(Transformer(), IDS, folder / "long.onnx", {0: "batch", 1: "length"}, legacy=True)
    with pytest.raises(InputError, match=r"length.*need a size"):
        read_onnx(path)
    graph = read_graph(path, seq_len=8)
    assert graph.tokens_per_sample == 8
    assert graph.model_flops == read_onnx(transformer).model_flops
    assert read_onnx(path, dims={"length": 16}).tokens_per_sample == 16


def test_a_plan_is_made_and_the_graph_survives_a_file(transformer: Path, tmp_path: Path) -> None:
    graph = read_model(str(transformer))
    store_graph(tmp_path / "graph.json", graph)
    assert load_graph(tmp_path / "graph.json") == graph
    assert read_model(str(transformer)).fingerprint == graph.fingerprint
    instance = Instance(graph, Cluster.parse("2xA100-40"), 8, precision="bf16-mixed")
    placed = place(instance, time_limit=0.02)
    assert placed.plan.graph == graph.fingerprint
    assert placed.estimate.step_time >= placed.bound > 0


def test_the_command_line_takes_an_onnx_file(
    transformer: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["plan", str(transformer), "2xA100-40", "--global-batch", "8", "--json"])
    assert ended.value.code == 0
    assert json.loads(capsys.readouterr().out)["model"] == "transformer"


def test_a_fixed_batch_is_taken_as_proportional(tmp_path: Path) -> None:
    node = helper.make_node("Gemm", ["x", "w"], ["y"], name="fc")
    fixed = read_onnx(write(tmp_path / "a.onnx", [node], {"x": [4, 8]}, {"w": [8, 5]}))
    named = read_onnx(write(tmp_path / "b.onnx", [node], {"x": ["N", 8]}, {"w": [8, 5]}))
    assert fixed.model_flops == named.model_flops == Affine(0.0, 2 * 2 * 8 * 5)


def test_a_tied_initializer_is_counted_once(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["a"], name="in"),
        helper.make_node("Relu", ["a"], ["b"], name="act"),
        helper.make_node("MatMul", ["b", "w"], ["y"], name="out"),
    ]
    graph = read_onnx(write(tmp_path / "tied.onnx", nodes, {"x": ["N", 6]}, {"w": [6, 6]}))
    assert len(graph.groups) == 2
    assert graph.tied == (("w", 36),)
    assert graph.params == 36


def test_functions_are_inlined(tmp_path: Path) -> None:
    body = [helper.make_node("Gemm", ["a", "b"], ["c"], name="inner")]
    function = helper.make_function(
        "mine", "Fc", ["a", "b"], ["c"], body, [helper.make_opsetid("", 23)]
    )
    node = helper.make_node("Fc", ["x", "w"], ["y"], domain="mine")
    path = write(tmp_path / "f.onnx", [node], {"x": ["N", 8]}, {"w": [8, 5]})
    model = onnx.load(path)
    model.functions.append(function)
    model.opset_import.append(helper.make_opsetid("mine", 1))
    onnx.save(model, path)
    assert read_onnx(path).groups[0].name == "Gemm"


def test_weights_outside_the_file_are_not_needed(tmp_path: Path) -> None:
    node = helper.make_node("Gemm", ["x", "w"], ["y"], name="fc")
    path = write(tmp_path / "big.onnx", [node], {"x": ["N", 64]}, {"w": [64, 64]})
    model = onnx.load(path)
    model.graph.initializer[0].raw_data = bytes(64 * 64 * 4)
    model.graph.initializer[0].ClearField("float_data")
    onnx.save(model, path, save_as_external_data=True, location="big.data")
    (tmp_path / "big.data").unlink()
    assert read_onnx(path).params == 64 * 64


@pytest.mark.parametrize(
    ("nodes", "message"),
    [
        ([helper.make_node("Fancy", ["x"], ["y"], domain="com.acme")], "knows no such op"),
        ([helper.make_node("NonZero", ["x"], ["y"], name="nz")], "NonZero nz.*depends on data"),
        ([helper.make_node("MatMul", ["x", "gone"], ["y"])], "'gone', which nothing before"),
        ([helper.make_node("MatMul", ["x", "w"], ["y"], name="mm")], "MatMul mm"),
    ],
)
def test_what_cannot_be_costed_names_the_node(
    nodes: list[onnx.NodeProto], message: str, tmp_path: Path
) -> None:
    path = write(tmp_path / "bad.onnx", nodes, {"x": ["N", 8]}, {"w": [7, 5]})
    with pytest.raises(InputError, match=message):
        read_onnx(path)


def test_control_flow_is_refused(tmp_path: Path) -> None:
    branch = helper.make_graph(
        [helper.make_node("Relu", ["x"], ["z"])],
        "branch",
        [],
        [helper.make_tensor_value_info("z", TensorProto.FLOAT, None)],
    )
    node = helper.make_node("If", ["c"], ["y"], "choose", then_branch=branch, else_branch=branch)
    inputs: dict[str, list[int | str]] = {"x": ["N", 8], "c": []}
    path = write(tmp_path / "if.onnx", [node], dict(inputs), {}, kinds={"c": TensorProto.BOOL})
    with pytest.raises(InputError, match=r"If choose.*body of its own"):
        read_onnx(path)


def test_files_that_are_no_onnx_are_refused(tmp_path: Path, transformer: Path) -> None:
    with pytest.raises(InputError, match="cannot be read"):
        read_onnx(tmp_path / "absent.onnx")
    (tmp_path / "cut.onnx").write_bytes(transformer.read_bytes()[:1000])
    with pytest.raises(InputError, match="not an ONNX file"):
        read_onnx(tmp_path / "cut.onnx")
    (tmp_path / "empty.onnx").write_bytes(b"")
    with pytest.raises(InputError, match="not an ONNX file"):
        read_onnx(tmp_path / "empty.onnx")


def test_the_error_names_the_extra(transformer: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnx", None)
    with pytest.raises(MissingExtraError, match=r"rlplace\[onnx\]"):
        read_graph(transformer)
