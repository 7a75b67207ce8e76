from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from rlplace.graph.program import Piece, export_program, extract
from rlplace.runtime.aside import Aside, apart, parameters_apart, putting

Op = Callable[[Tensor, Tensor, Tensor], Tensor]

#: Name -> (op of input, parameter and bias, shapes of the three).
OPS: dict[str, tuple[Op, tuple[int, ...], tuple[int, ...], tuple[int, ...]]] = {
    "linear": (F.linear, (4, 5, 8), (6, 8), (6,)),
    "linear, rows": (F.linear, (7, 8), (6, 8), (6,)),
    "linear, four dims": (F.linear, (2, 3, 5, 8), (6, 8), (6,)),
    "linear, transposed input": (
        lambda x, w, b: F.linear(x.transpose(1, 2), w, b),
        (4, 8, 5),
        (6, 8),
        (6,),
    ),
    "linear, no bias": (lambda x, w, b: F.linear(x, w) + b, (4, 5, 8), (6, 8), (6,)),
    "matmul": (lambda x, w, b: x @ w + b, (4, 5, 8), (8, 6), (6,)),
    "matmul, transposed": (lambda x, w, b: x @ w.t() + b, (4, 5, 8), (6, 8), (6,)),
    "mm": (lambda x, w, b: torch.mm(x, w) + b, (5, 8), (8, 6), (6,)),
    "addmm": (lambda x, w, b: torch.addmm(b, x, w), (5, 8), (8, 6), (6,)),
    "bmm": (lambda x, w, b: torch.bmm(x.transpose(0, 1), w) + b, (5, 3, 8), (3, 8, 6), (6,)),
    "conv1d": (lambda x, w, b: F.conv1d(x, w, b, 2, 1), (3, 4, 9), (6, 4, 3), (6,)),
    "conv2d": (lambda x, w, b: F.conv2d(x, w, b, padding=1), (3, 4, 7, 7), (6, 4, 3, 3), (6,)),
    "conv2d, groups": (
        lambda x, w, b: F.conv2d(x, w, b, stride=2, groups=2),
        (3, 4, 7, 7),
        (6, 2, 3, 3),
        (6,),
    ),
}


class Net(nn.Module):
    def __init__(self, op: Op, weight: tuple[int, ...], bias: tuple[int, ...]) -> None:
        super().__init__()
        self.op = op
        self.weight, self.bias = nn.Parameter(torch.randn(weight)), nn.Parameter(torch.randn(bias))

    def forward(self, x: Tensor) -> Tensor:
        return self.op(x.tanh(), self.weight, self.bias).tanh().sum()


class Table(nn.Module):
    """A table that is used twice, with ids and as a matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(9, 4, padding_idx=0)
        self.norm = nn.LayerNorm(4)

    def forward(self, x: Tensor) -> Tensor:
        rows = self.norm(self.table(x))
        return F.linear(rows, self.table.weight).logsumexp(-1).sum()


def piece_of(net: nn.Module, x: Tensor) -> Piece:
    program = export_program(net, (), {"x": x})
    piece = extract(program, [node.name for node in program.nodes], device="cpu")
    return apart(piece, program.trainable)


def gradients(
    net: nn.Module, piece: Piece, x: Tensor, aside: Aside | None, redo: bool = False
) -> tuple[list[Tensor | None], list[Tensor | None]]:
    """Gradients of (input, parameters) after the first part of backward, and in the end."""
    source = x.clone().requires_grad_(x.is_floating_point())
    params = dict(net.named_parameters())
    leaves = [source, *params.values()]
    for leaf in leaves:
        leaf.grad = None
    states = [params[name] for _, name in piece.states]
    with putting(aside):
        if redo:
            (out,) = checkpoint(piece.module, *states, source, use_reentrant=False)
        else:
            (out,) = piece.module(*states, source)
        torch.autograd.backward(out)
    first = [None if leaf.grad is None else leaf.grad.clone() for leaf in leaves]
    if aside is not None:
        aside.make()
    return first, [leaf.grad for leaf in leaves]


@pytest.mark.parametrize("redo", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", OPS)
def test_same_bits_in_two_parts(name: str, dtype: torch.dtype, redo: bool) -> None:
    op, *shapes = OPS[name]
    torch.manual_seed(0)
    net = Net(op, *shapes[1:]).to(dtype)
    x = torch.randn(shapes[0], dtype=dtype)
    piece = piece_of(net, x)
    assert "weight" in parameters_apart(piece)
    _, wanted = gradients(net, piece, x, None)
    kept: list[Tensor] = []
    first, last = gradients(net, piece, x, Aside(kept.append), redo)
    assert first[1] is None, "the gradient of the parameter is made later"
    assert len(kept) >= 2
    for found, want in zip((first[0], *last), (wanted[0], *wanted), strict=True):
        assert found is not None
        assert want is not None
        assert torch.equal(found, want)


def test_tables_and_other_ops() -> None:
    torch.manual_seed(0)
    net, ids = Table(), torch.tensor([[1, 0, 3], [1, 2, 8]])
    piece = piece_of(net, ids)
    assert parameters_apart(piece) == {"table.weight"}
    _, wanted = gradients(net, piece, ids, None)
    first, last = gradients(net, piece, ids, Aside(lambda tensor: None))
    assert first[1] is None
    assert first[2] is not None, "a norm gets its gradient at once"
    for found, want in zip(last[1:], wanted[1:], strict=True):
        assert found is not None
        assert want is not None
        assert torch.equal(found, want)


def test_hooks_see_a_gradient_once() -> None:
    net, ids = Table(), torch.tensor([[1, 0, 3], [1, 2, 8]])
    piece = piece_of(net, ids)
    seen: list[str] = []
    for name, param in net.named_parameters():
        param.register_post_accumulate_grad_hook(lambda _, own=name: seen.append(own))  # type: ignore[no-untyped-call]
    aside = Aside(lambda tensor: None)
    first, _ = gradients(net, piece, ids, aside)
    assert first[1] is None
    assert sorted(seen) == ["norm.bias", "norm.weight", "table.weight"]
    assert seen[-1] == "table.weight"


def test_frozen_parameters_stay_in_the_op() -> None:
    net = Net(F.linear, (6, 8), (6,)).requires_grad_(False)
    piece = piece_of(net, torch.randn(4, 5, 8))
    assert parameters_apart(piece) == set()
