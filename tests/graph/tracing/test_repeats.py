from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from rlplace.graph import library
from rlplace.graph.tracing.repeats import trace_repeats_once


def export(module: nn.Module, inputs: Any, once: bool) -> ExportedProgram:
    args, kwargs = ((), inputs) if isinstance(inputs, dict) else (inputs, {})
    shapes = torch.export.ShapesCollection()  # type: ignore[no-untyped-call]
    for tensor in torch.utils._pytree.tree_leaves(inputs):
        shapes[tensor] = {0: torch.export.Dim.DYNAMIC}
    dynamic = shapes.dynamic_shapes(module, args, kwargs)  # type: ignore[no-untyped-call]
    with trace_repeats_once() if once else nullcontext():
        return torch.export.export(module, args, kwargs, dynamic_shapes=dynamic, strict=False)


def text(program: ExportedProgram) -> list[str]:
    """Every node with what later passes read; sizes and repeated calls may be numbered anew."""
    lines = [
        f"{node.format_node()} {node.meta.get('val')} {node.meta.get('nn_module_stack')}"
        for node in program.graph.nodes
    ]
    return [re.sub(r"@\d+|(?<=sym_size_int)_\d+", "", line) for line in lines]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Paths of the layers that are copied. The first two are traced: one reads plain input."""
    found: list[str] = []
    import rlplace.graph.tracing.repeats as module

    plain: Callable[..., Any] = module._replay

    def replay(recording: Any, tracer: Any, m: nn.Module, path: str, call: Any) -> Any:
        found.append(path.removeprefix("_export_root."))
        return plain(recording, tracer, m, path, call)

    monkeypatch.setattr(module, "_replay", replay)
    return found


@pytest.mark.parametrize(
    ("name", "shape", "copied"),
    [
        ("llama-tiny", {"layers": 4}, 3),
        ("gpt2-tiny", {"layers": 4, "dropout": 0.1}, 3),
        ("bert-tiny", {"layers": 3}, 2),
        ("t5-tiny", {"layers": 4}, 4),  # the first layer of each stack has the position bias
        ("vit-tiny", {"layers": 3}, 2),
        ("mixtral-tiny", {"layers": 3}, 2),
        ("resnet-tiny", {"depths": "2,4"}, 2),
    ],
)
def test_graph_is_that_of_plain_tracing(
    name: str, shape: dict[str, Any], copied: int, calls: list[str]
) -> None:
    spec = library.spec(name, **shape)
    with torch.device("meta"):
        module = spec.make()
    inputs = {key: tensor.to("meta") for key, tensor in spec.example(2).items()}
    assert text(export(module, inputs, once=True)) == text(export(module, inputs, once=False))
    assert len(calls) == copied


class Layer(nn.Module):
    def __init__(self, index: int) -> None:
        super().__init__()
        self.index = index
        self.note = ""
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        out: Tensor = x + scale * self.linear(x).relu()
        return out


class ReadsItsIndex(Layer):
    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return super().forward(x) if self.index % 2 else super().forward(x).tanh()


class SetsAnAttribute(Layer):
    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        self.last = super().forward(x)
        return self.last


class Stack(nn.Module):
    def __init__(self, kind: type[Layer], count: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(kind(index) for index in range(count))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.sum()


def check(module: nn.Module, *inputs: Tensor) -> None:
    """Same nodes as plain tracing, and the same result as the module."""
    once = export(module, inputs, once=True)
    assert text(once) == text(export(module, inputs, once=False))
    torch.testing.assert_close(once.module()(*inputs), module(*inputs))


def test_equal_layers_are_copied(calls: list[str]) -> None:
    check(Stack(Layer), torch.randn(2, 4))
    assert calls == ["layers.2", "layers.3"]


def test_layer_that_reads_what_differs_is_traced(calls: list[str]) -> None:
    check(Stack(ReadsItsIndex), torch.randn(2, 4))
    assert not calls


def test_layer_that_sets_an_attribute_is_traced(calls: list[str]) -> None:
    module = Stack(SetsAnAttribute)
    with pytest.warns(UserWarning, match="assigned during export"):
        export(module, (torch.randn(2, 4),), once=True)
    assert not calls


def test_hooks_are_run(calls: list[str]) -> None:
    module = Stack(Layer)
    module.layers[2].register_forward_hook(lambda m, args, out: out * 2)
    check(module, torch.randn(2, 4))
    assert calls == ["layers.3"]


@pytest.mark.parametrize("change", ["training", "frozen", "class", "attribute"])
def test_unlike_layer_is_traced(change: str, calls: list[str]) -> None:
    module = Stack(Layer)
    odd = module.layers[2]
    assert isinstance(odd, Layer)
    if change == "training":
        odd.eval()
    elif change == "frozen":
        odd.linear.weight.requires_grad_(False)
    elif change == "class":
        module.layers[2] = ReadsItsIndex(2)
    else:
        odd.note = "not read, so no reason"
    check(module, torch.randn(2, 4))
    assert ("layers.2" in calls) == (change == "attribute")


def test_other_arguments_are_traced(calls: list[str]) -> None:
    class Scales(Stack):
        def forward(self, x: Tensor) -> Tensor:
            for layer, scale in zip(self.layers, (1.0, 2.0, 1.0, 2.0), strict=True):
                x = layer(x, scale)
            return x.sum()

    check(Scales(Layer), torch.randn(2, 4))
    assert calls == ["layers.3"]


class Residual(nn.Module):
    """Two branches whose sum is written into the first one's output."""

    def __init__(self) -> None:
        super().__init__()
        self.main, self.shortcut = (
            nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)) for _ in range(4))
            for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        for main, shortcut in zip(self.main, self.shortcut, strict=True):
            y = main(x)
            y += shortcut(x)
            x = y.relu_()
        return x.sum()


def test_output_that_the_caller_writes_into(calls: list[str]) -> None:
    check(Residual(), torch.randn(8, 4))
    assert calls == ["main.2", "shortcut.2", "main.3", "shortcut.3"]


class WritesIntoItsInput(Layer):
    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        x.add_(1.0)
        return super().forward(x, scale)


def test_layer_that_writes_into_its_input_is_traced(calls: list[str]) -> None:
    class Reads(Stack):
        def forward(self, x: Tensor) -> Tensor:
            total = torch.zeros(())
            for layer in self.layers:
                h = x * 2
                total = total + layer(h).sum() + h.sum()
            return total

    check(Reads(WritesIntoItsInput), torch.randn(2, 4))
    assert not calls


def test_object_argument_is_not_trusted(calls: list[str]) -> None:
    class Remembers(nn.Module):
        def __init__(self, index: int) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor, seen: set[str]) -> Tensor:
            seen.add(f"{len(seen)}")
            out: Tensor = self.linear(x) * len(seen)
            return out

    class Owner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Remembers(index) for index in range(3))

        def forward(self, x: Tensor) -> Tensor:
            seen: set[str] = set()
            for layer in self.layers:
                x = layer(x, seen)
            return x.sum()

    check(Owner(), torch.randn(2, 4))
    assert not calls


def test_layer_called_twice_and_nested_layers(calls: list[str]) -> None:
    class Nested(Layer):
        def __init__(self, index: int) -> None:
            super().__init__(index)
            self.blocks = nn.ModuleList(Layer(i) for i in range(2))

        def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
            for block in self.blocks:
                x = block(x) + block(x)
            return x

    check(Stack(Nested, 4), torch.randn(2, 4))
    assert calls[-2:] == ["layers.2", "layers.3"]


def test_tracer_is_as_before_after_an_error() -> None:
    before = torch.fx.experimental.proxy_tensor._ModuleStackTracer.call_module
    with pytest.raises(ZeroDivisionError), trace_repeats_once():
        raise ZeroDivisionError
    assert torch.fx.experimental.proxy_tensor._ModuleStackTracer.call_module is before
