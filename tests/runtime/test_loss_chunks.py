from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rlplace.errors import InputError
from rlplace.graph.program import Piece, Program, export_program, extract
from rlplace.runtime.loss_chunks import chunked, chunked_loss, losses
from rlplace.runtime.memory import LiveTracker

TOKENS, WIDTH, CLASSES = 8, 16, 1024


class Head(nn.Module):
    """A linear and a cross entropy, with something between."""

    def __init__(self, between: Callable[[Tensor], Tensor], bias: bool = True) -> None:
        super().__init__()
        self.between = between
        self.head = nn.Linear(WIDTH, CLASSES, bias=bias)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        scores = self.between(self.head(x.tanh()))
        return F.cross_entropy(scores.flatten(0, -2), y.flatten())


def piece_of(head: Head, x: Tensor, y: Tensor) -> Piece:
    program: Program = export_program(head, (), {"x": x, "y": y})
    return extract(program, [node.name for node in program.nodes], device="cpu")


def loss_and_gradients(piece: Piece, head: Head, x: Tensor, y: Tensor) -> list[Tensor]:
    states = [head.get_parameter(name) for _, name in piece.states]
    values = {"x": x, "y": y}
    (loss,) = piece.module(*states, *(values[name] for name in piece.inputs))
    return [loss.detach(), *torch.autograd.grad(loss, [*states, x])]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    "between",
    [lambda s: s, lambda s: s.float(), lambda s: s[:, :-1], lambda s: s[:, 1:].double()],
)
@pytest.mark.parametrize("chunks", [2, 5])
def test_chunks_give_the_same_loss_and_gradients(
    between: Callable[[Tensor], Tensor], bias: bool, chunks: int
) -> None:
    torch.manual_seed(0)
    head = Head(between, bias).double()
    x = torch.randn(3, TOKENS, WIDTH, dtype=torch.double, requires_grad=True)
    kept = between(torch.zeros(3, TOKENS, 1)).shape[1]
    y = torch.randint(0, CLASSES, (3, kept))
    y[0, :2] = -100
    wanted = loss_and_gradients(piece_of(head, x, y), head, x, y)
    piece = chunked(piece_of(head, x, y), chunks)
    assert not losses(piece)
    assert [node.target for node in piece.module.graph.nodes].count(chunked_loss) == 1
    for found, right in zip(loss_and_gradients(piece, head, x, y), wanted, strict=True):
        torch.testing.assert_close(found, right, rtol=1e-6, atol=1e-9)


def test_the_scores_of_one_chunk_exist_at_a_time() -> None:
    head = Head(lambda s: s, bias=False)
    x = torch.randn(16, TOKENS, WIDTH, requires_grad=True)
    y = torch.randint(0, CLASSES, (16, TOKENS))

    def peak(piece: Piece) -> int:
        with LiveTracker() as live:
            loss_and_gradients(piece, head, x, y)
        return int(live.peak)

    scores = 16 * TOKENS * CLASSES * 4
    weight = CLASSES * WIDTH * 4
    assert peak(piece_of(head, x, y)) > 2 * scores
    # Scores, log-probabilities and gradients of one chunk, and the gradients of the states.
    assert peak(chunked(piece_of(head, x, y), 8)) < 5 * scores / 8 + weight + 4 * x.nbytes


@pytest.mark.parametrize(
    ("between", "name"),
    [(lambda s: s * 2, "mul"), (lambda s: s.transpose(0, 1), "transpose")],
)
def test_what_is_between_is_refused_by_name(between: Callable[[Tensor], Tensor], name: str) -> None:
    x, y = torch.zeros(4, 4, WIDTH), torch.zeros(4, 4, dtype=torch.long)
    with pytest.raises(InputError, match=rf"plan.loss_chunks.*\({name}\)"):
        chunked(piece_of(Head(between), x, y), 2)
