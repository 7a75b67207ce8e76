from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rlplace.graph import library
from rlplace.graph.coarsen import coarsen
from rlplace.graph.program import Program, export_program, extract, prologue_of
from rlplace.graph.tracing.twins import meta_twin

FAMILIES = ["gpt2", "llama", "bert", "t5", "vit", "resnet", "mixtral", "dlrm"]


def run_in_pieces(
    program: Program,
    groups: list[tuple[str, ...]],
    states: Mapping[str, Tensor],
    inputs: dict[str, Tensor],
) -> Tensor:
    """The loss, computed group after group; each computes what it needs of the prologue again."""
    given = dict(zip(program.inputs, program.unflatten((), inputs), strict=True))
    made: dict[str, Tensor] = {}
    for names in groups:
        piece = extract(program, names, device="cpu")
        wanted = [read for read in piece.reads if read in program.prologue]
        first = extract(program, prologue_of(program, piece.reads), writes=wanted, device="cpu")
        values = dict(made)
        for part in (first, piece):
            args = [states[name] for _, name in part.states]
            args += [given[name] for name in part.inputs]
            args += [values[name] for name in part.reads]
            values |= dict(zip(part.writes, part.module(*args), strict=True))
        made |= {name: values[name] for name in piece.writes}
    return made[program.outputs[0]]


@pytest.mark.parametrize("family", FAMILIES)
def test_groups_give_the_loss_and_gradients_of_the_module(family: str) -> None:
    spec = library.spec(f"{family}-tiny")
    torch.manual_seed(0)
    module = spec.make()
    program = export_program(module, (), spec.example(2))
    inputs = spec.example(3, seed=1)  # another batch than the exported one
    expected = module(**inputs)
    expected.backward()
    gradients = {name: p.grad for name, p in module.named_parameters()}
    module.zero_grad()
    states = dict(module.named_parameters()) | dict(module.named_buffers())
    loss = run_in_pieces(program, coarsen(program), states, inputs)
    torch.autograd.backward(loss)
    torch.testing.assert_close(loss, expected)
    for name, param in module.named_parameters():
        torch.testing.assert_close(param.grad, gradients[name], msg=name)


class Masked(nn.Module):
    """Builds a mask by writing into a view, as `shift_right` of an encoder-decoder does."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.zeros_like(x)
        mask[:, 1:] = x[:, :-1]
        mask.mul_(2.0)
        out: Tensor = self.layer(x) * mask
        return out.sum()


def test_writes_into_the_prologues_own_tensors_belong_to_it() -> None:
    module, x = Masked(), torch.randn(2, 4)
    program = export_program(module, (x,))
    names = {node.name for node in program.body()}
    assert not any("copy_" in name or "mul_" in name for name in names)
    piece = extract(program, names, device="cpu")
    wanted = prologue_of(program, piece.reads)
    assert any("copy_" in name for name in wanted)
    first = extract(program, wanted, writes=piece.reads, device="cpu")
    states = dict(module.named_parameters())
    for _ in range(2):  # a second time, as when a group is recomputed
        reads = first.module(*([x] * len(first.inputs)))
        inputs = [x] * len(piece.inputs)
        (loss,) = piece.module(*(states[name] for _, name in piece.states), *inputs, *reads)
        torch.testing.assert_close(loss, module(x))


def test_a_write_into_a_buffer_stays_with_the_ops() -> None:
    program = export_program(nn.BatchNorm1d(4), (torch.randn(2, 4),))
    assert any("add_" in node.name for node in program.body())


def test_constants_on_the_device_of_an_input_keep_their_values() -> None:
    class Indexed(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            scale = torch.tensor([3.0, 5.0], device=x.device)
            return (x[:, [2, 0]] * scale).sum(-1)

    program = export_program(nn.Sequential(Indexed()), (torch.randn(2, 4),))
    piece = extract(program, [node.name for node in program.nodes], device="cpu")
    constants = [program.exported.constants[name] for _, name in piece.states]
    x = torch.tensor([[1.0, 0.0, 10.0, 0.0]] * 3)
    (out,) = piece.module(*constants, x)
    assert out.tolist() == [35.0] * 3


def test_one_tensor_given_twice_is_two_inputs() -> None:
    class Both(nn.Module):
        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            return (a - b).sum()

    x = torch.ones(2, 3)
    program = export_program(Both(), (x, x))
    assert len(program.inputs) == 2
    piece = extract(program, [node.name for node in program.nodes], device="cpu")
    (out,) = piece.module(x, 3 * x)
    assert out == -12.0


def test_twin_has_no_storage_and_keeps_ties() -> None:
    module = library.spec("gpt2-tiny").make()
    twin = meta_twin(module)
    assert all(p.device.type == "meta" for p in twin.parameters())
    assert len(list(twin.parameters())) == len(list(module.parameters()))
    assert all(p.device.type == "cpu" for p in module.parameters())


def test_call_with_other_arguments_is_refused() -> None:
    spec = library.spec("gpt2-tiny")
    program = export_program(spec.make(), (), spec.example(2))
    with pytest.raises(ValueError, match="captured with"):
        program.unflatten((), {"input_ids": torch.zeros(2, 4)})


class _MaskedSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, mask: Tensor) -> Tensor:
        return torch.softmax(x, -1).masked_fill_(mask, 0.0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise AssertionError("the export does not keep it")


def test_what_a_backward_needs_is_not_written_into() -> None:
    """The forward of a Function may write into a softmax; what is run has autograd's backward."""

    class Attends(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            made = _MaskedSoftmax.apply(self.linear(x), mask)  # type: ignore[no-untyped-call]  # torch
            scores: Tensor = made
            return scores.square().sum()

    module, x, mask = Attends(), torch.randn(3, 4), torch.rand(3, 4) > 0.5
    with pytest.warns(UserWarning, match="_MaskedSoftmax"):
        program = export_program(module, (x, mask))
    piece = extract(program, [node.name for node in program.nodes], device="cpu")
    states = dict(module.named_parameters())
    given = {"x": x, "mask": mask}
    (loss,) = piece.module(*(states[n] for _, n in piece.states), *(given[n] for n in piece.inputs))
    gradient = torch.autograd.grad(loss, states["linear.weight"])[0]
    plain = torch.softmax(module.linear(x), -1).masked_fill(mask, 0.0).square().sum()
    torch.testing.assert_close(loss, plain)
    torch.testing.assert_close(gradient, torch.autograd.grad(plain, states["linear.weight"])[0])
