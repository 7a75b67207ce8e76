from __future__ import annotations

import copy
import functools
from collections import Counter
from statistics import median
from typing import Any

import networkx
import pytest
import torch
from torch import Tensor, nn

from rlplace.errors import InputError
from rlplace.graph import library
from rlplace.graph.capture import capture
from rlplace.graph.coarsen import MAX_GROUPS, coarsen
from rlplace.graph.groups.anchors import is_anchor, kind, module_path
from rlplace.graph.groups.parts import MAX_ANCHORS
from rlplace.graph.program import Program, export_program, extract, prologue_of
from rlplace.runtime.pieces import protected
from tests.graph.branching_modules import EXAMPLES, WIDTH, Layers, example, exported


def groups_of(module: nn.Module, *args: Any, granularity: str = "fine") -> list[list[str]]:
    """The kinds of ops of each group."""
    program = export_program(module, args)
    kinds = {node.name: str(node.target).split(".")[1] for node in program.body()}
    return [[kinds[name] for name in group] for group in coarsen(program, granularity)]


@pytest.mark.parametrize("family", ["gpt2", "t5", "dlrm"])
def test_groups_are_intervals_and_only_tensors_cross(family: str) -> None:
    spec = library.spec(f"{family}-tiny")
    with torch.device("meta"):
        module = spec.make()
    program = export_program(module, (), spec.example(2))
    groups = coarsen(program)
    assert [name for group in groups for name in group] == [n.name for n in program.body()]
    home = {name: index for index, group in enumerate(groups) for name in group}
    for node in program.body():
        for user in node.users:
            if home.get(user.name, home[node.name]) != home[node.name]:
                assert isinstance(node.meta["val"], Tensor)
                assert home[user.name] > home[node.name]


@pytest.mark.parametrize(
    ("name", "groups", "structures"),
    [("gpt2-tiny", 6, 4), ("llama-tiny", 6, 4), ("mixtral-tiny", 6, 4), ("vit-tiny", 6, 4)],
)
def test_layers_are_an_attention_and_an_mlp_with_one_tensor_between(
    name: str, groups: int, structures: int
) -> None:
    graph = library.build(name)
    assert (len(graph.groups), len(graph.structures)) == (groups, structures)
    assert [(edge.src, edge.dst) for edge in graph.edges] == [(i, i + 1) for i in range(groups - 1)]
    uses = Counter(group.structure for group in graph.groups)
    assert sorted(uses.values()) == [1, 1, 2, 2]


def test_encoder_output_is_background() -> None:
    graph = library.build("t5-tiny")
    assert len(graph.groups) == 1 + 2 * 2 + 1 + 3 * 2 + 1
    readers = Counter(edge.tensor for edge in graph.edges)
    assert max(readers.values()) == 2  # each decoder layer reads the encoder's output


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8))
            for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = x + block(x)
        return x.mean()


def test_cut_is_right_after_the_residual_add() -> None:
    stem, first, second = groups_of(Residual(), torch.randn(2, 8))
    assert stem == ["linear"]
    assert first == ["layer_norm", "linear", "relu", "linear", "add"]
    assert second == [*first, "mean"]


def test_an_activation_goes_with_what_it_is_applied_to() -> None:
    module = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
    assert groups_of(module, torch.randn(2, 8)) == [["linear", "relu"], ["linear"]]


class Wide(nn.Module):
    """Two branches side by side: everywhere at least two tensors are alive."""

    def __init__(self, depth: int = 20) -> None:
        super().__init__()
        self.left = nn.ModuleList(nn.Linear(4, 4) for _ in range(depth))
        self.right = nn.ModuleList(nn.Linear(4, 4) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        left = right = x * 1.0
        for a, b in zip(self.left, self.right, strict=True):
            left, right = a(left), b(right)
        return (left * right).mean()


def test_a_long_interval_is_cut_even_where_two_tensors_cross() -> None:
    groups = groups_of(Wide(), torch.randn(2, 4))
    assert max(group.count("linear") for group in groups) <= MAX_ANCHORS
    assert len(groups) > 1


class Writes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.a(x)
        z = self.b(y.detach())
        y.add_(z)
        out: Tensor = self.c(y)
        return out.mean()


def test_a_tensor_is_not_changed_by_another_group_than_its_maker() -> None:
    groups = groups_of(Writes(), torch.randn(2, 4))
    (home,) = [group for group in groups if "add_" in group]
    assert home[0] == "linear"
    assert home.count("linear") == 2


@functools.cache
def very_deep() -> Program:
    layers = (nn.Linear(2, 2) for _ in range(MAX_GROUPS["fine"] + 50))
    return export_program(nn.Sequential(*layers), (torch.randn(2, 2),))


def test_too_many_equal_layers_are_joined_evenly() -> None:
    for granularity, most in MAX_GROUPS.items():
        sizes = Counter(len(group) for group in coarsen(very_deep(), granularity))
        assert most / 2 <= sizes.total() <= most
        ((usual, count),) = sizes.most_common(1)
        assert count >= sizes.total() - 2  # the first and the last may differ
        assert max(sizes) <= usual + 1


@pytest.mark.parametrize("wanted", [1, 2, 60, 125, 126, 200, 249, 250])
def test_a_number_of_groups_is_met(wanted: int) -> None:
    sizes = [len(group) for group in coarsen(very_deep(), wanted)]
    assert len(sizes) == wanted
    assert max(sizes) <= 2 * min(sizes) + 1


@pytest.mark.parametrize("name", ["gpt2-tiny", "resnet-tiny"])
def test_a_number_of_groups_goes_from_one_to_the_anchors(name: str) -> None:
    program = library_program(name)
    anchors = sum(map(is_anchor, program.body()))
    counts = [len(coarsen(program, wanted)) for wanted in range(1, anchors + 3)]
    assert counts == [*range(1, anchors + 1), anchors, anchors]


def test_coarse_keeps_layers_whole() -> None:
    program = library_program("gpt2-tiny")
    paths = {node.name: module_path(node) for node in program.body()}
    for layer in ("h.0", "h.1"):
        homes = [
            i
            for i, group in enumerate(coarsen(program, "coarse"))
            if any(f".{layer}." in paths[name] for name in group)
        ]
        assert len(homes) == 1


@pytest.mark.parametrize("granularity", ["finest", 0, -3, True, 2.5, None])
def test_other_granularities_are_refused(granularity: Any) -> None:
    with pytest.raises(InputError, match="granularity="):
        coarsen(library_program("gpt2-tiny"), granularity)


@functools.cache
def library_program(name: str) -> Program:
    spec = library.spec(name)
    with torch.device("meta"):
        module = spec.make()
    return export_program(module, (), spec.example(2))


HALVES = {"gpt2-tiny": 4, "llama-tiny": 4, "mixtral-tiny": 4, "bert-tiny": 5, "t5-tiny": 10}


@pytest.mark.parametrize("name", list(HALVES))
def test_each_half_of_a_layer_is_a_group(name: str) -> None:
    """A residual add (or the norm after it) ends it; embeddings and head are groups besides."""
    program = library_program(name)
    kinds = {node.name: kind(node) for node in program.body()}
    ends = [kinds[group[-1]] for group in coarsen(program)]
    layers = sum(end in ("add", "layer_norm") for end in ends)
    assert layers == HALVES[name]
    assert len(ends) == layers + (3 if name == "t5-tiny" else 2)


@pytest.mark.parametrize("name", EXAMPLES)
def test_groups_hold_each_op_once_and_are_convex(name: str) -> None:
    program = exported(name)
    groups = coarsen(program)
    assert [op for group in groups for op in group] == [node.name for node in program.body()]
    graph = networkx.DiGraph()
    home = {op: index for index, group in enumerate(groups) for op in group}
    graph.add_nodes_from(range(len(groups)))
    for node in program.body():
        for user in node.users:
            if user.name in home and home[user.name] != home[node.name]:
                graph.add_edge(home[node.name], home[user.name])
                assert isinstance(node.meta["val"], Tensor)
    assert networkx.is_directed_acyclic_graph(graph)  # no path leaves a group and comes back
    assert all(start < stop for start, stop in graph.edges)


@pytest.mark.parametrize("name", EXAMPLES)
def test_another_export_gives_the_same_groups(name: str) -> None:
    module, args = example(name)
    assert coarsen(export_program(module, args)) == coarsen(exported(name))


@pytest.mark.parametrize("name", EXAMPLES)
def test_groups_compute_the_loss_and_gradients(name: str) -> None:
    """Group after group on detached tensors, as stages on different devices do it."""
    torch.manual_seed(0)
    module, args = example(name)
    program = exported(name)
    twin = copy.deepcopy(module)
    expected = twin(*args)
    expected.backward()
    states = dict(module.named_parameters()) | dict(module.named_buffers())
    values: dict[str, Any] = dict(zip(program.inputs, program.unflatten(args, {}), strict=True))
    crossed: list[tuple[Tensor, Tensor]] = []
    first = extract(program, prologue_of(program, program.prologue), device="cpu")
    for piece in [first, *(protected(extract(program, g, device="cpu")) for g in coarsen(program))]:
        given = [states[state] for _, state in piece.states]
        for read in (*piece.inputs, *piece.reads):
            value = values[read]
            if isinstance(value, Tensor) and value.requires_grad:
                leaf = value.detach().requires_grad_()
                crossed.append((value, leaf))
                value = leaf
            given.append(value)
        values |= dict(zip(piece.writes, piece.module(*given), strict=True))
    torch.testing.assert_close(values[program.outputs[0]], expected)
    torch.autograd.backward(values[program.outputs[0]])
    for value, leaf in reversed(crossed):
        if leaf.grad is not None:
            torch.autograd.backward(value, leaf.grad, retain_graph=True)
    for key, param in module.named_parameters():
        torch.testing.assert_close(param.grad, twin.get_parameter(key).grad, msg=key)


def modules_of(name: str) -> list[set[str]]:
    """The modules of the anchors of each group."""
    program = exported(name)
    nodes = {node.name: node for node in program.body()}
    return [
        {module_path(nodes[op]) for op in group if is_anchor(nodes[op])}
        for group in coarsen(program)
    ]


@pytest.mark.parametrize(
    ("name", "apart"),
    [
        ("inception", [f"mixed_5{c}.branch{b}" for c in "bc" for b in ("1x1", "3x3", "5x5", "_p")]),
        ("towers", ["vision.0", "vision.1", "vision.2", "text.0", "text.1", "patches", "tokens"]),
        ("unet", [f"{way}.{i}" for way in ("down", "up") for i in range(4)] + ["mid", "out"]),
        ("dense", [f"denselayer{i}" for i in range(1, 6)]),
        ("encoder-decoder", ["encoder.0", "encoder.1", "decoder.0", "decoder.1", "head"]),
        ("encoder-decoder", [f"decoder.{i}.{k}" for i in "01" for k in ("attn", "cross", "mlp")]),
        ("parallel", [f"layers.{i}.{kind}" for i in "01" for kind in ("attn", "mlp")]),
        ("shortcut", ["stem", "main", "shortcut"]),
    ],
)
def test_branches_and_levels_are_groups_of_their_own(name: str, apart: list[str]) -> None:
    groups = modules_of(name)
    for part in apart:
        own = [group for group in groups if any(path.startswith(part) for path in group)]
        assert own
        assert all(path.startswith(part) for group in own for path in group)


ATTENDING = ["layers", "adapters", "parallel", "towers", "encoder-decoder"]


@pytest.mark.parametrize("name", ATTENDING)
def test_the_factors_of_attention_stay_together(name: str) -> None:
    seen = 0
    for group in modules_of(name):
        heads = {path.partition(".attn.")[0] for path in group if ".attn." in path}
        for head in heads:
            own = {path.removeprefix(f"{head}.attn.").split(".")[0] for path in group}
            assert own >= {"q", "k", "v", "o"}
            seen += 1
    assert seen >= 2


def test_both_uses_of_a_tower_are_cut_alike() -> None:
    graph = capture(*example("siamese"), degrees=())
    used = [group.structure for group in graph.groups]
    assert len(used) == 9
    assert used[:4] == used[4:8]


@pytest.mark.parametrize("count", [3, 6, 9])
def test_equal_layers_share_structures(count: int) -> None:
    graph = capture(Layers(count), (torch.randn(2, 5, WIDTH),), degrees=())
    assert len(graph.groups) == 2 * count
    # The first attention reads a user's input, the last MLP takes the mean.
    assert len(graph.structures) == 4
    work = [graph.structure(i).work for i in range(len(graph.groups))]
    costs = [one.flops(1) + one.moved(1) for one in work]
    assert max(costs) <= 2 * median(costs)


def test_a_model_without_anchors_is_one_group() -> None:
    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.factor = nn.Parameter(torch.ones(4))

        def forward(self, x: Tensor) -> Tensor:
            return (x * self.factor).mean()

    graph = capture(Scale(), (torch.randn(2, 4),), degrees=())
    assert [group.ops for group in graph.groups] == [("mul", "mean")]
