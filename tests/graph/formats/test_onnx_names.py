from __future__ import annotations

from onnx import NodeProto, helper

from rlplace.graph.formats.onnx_names import group_names, module_of

STORED = frozenset({"fc.weight", "layers.0.up.weight", "layers.0.down.weight"})


def matmul(weight: str, name: str = "", scopes: list[str] | None = None) -> NodeProto:
    node: NodeProto = helper.make_node("MatMul", ["x", weight], ["y"], name=name)
    if scopes is not None:
        node.metadata_props.add(key="pkg.torch.onnx.name_scopes", value=repr(scopes))
    return node


def test_the_module_comes_from_notes_then_name_then_parameters() -> None:
    noted = matmul("fc.weight", "/other/MatMul", ["", "layers.2", "layers.2.o", "linear_9"])
    assert module_of(noted, STORED) == "layers.2.o"
    assert module_of(matmul("fc.weight", "/layers.1/qkv/MatMul"), STORED) == "layers.1.qkv"
    assert module_of(matmul("fc.weight", "MatMul_7"), STORED) == "fc"
    assert module_of(matmul("val_3"), STORED) == ""


def test_a_group_is_named_by_what_its_working_ops_share() -> None:
    mlp = [matmul("layers.0.up.weight"), matmul("layers.0.down.weight")]
    relu = helper.make_node("Relu", ["y"], ["z"], name="/elsewhere/Relu")
    groups = [[*mlp, relu], mlp, [matmul("fc.weight")], [matmul("val_3")], [relu]]
    assert group_names(groups, STORED) == ["layers.0", "layers.0#2", "fc", "MatMul", "elsewhere"]
