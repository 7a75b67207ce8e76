"""The counts of the tiny model of every family against a real run of the real module on the CPU.

Parameters and FLOPs must be equal, saved bytes within 5 %. A measured run and a graph are compared
under the same conditions, and each of these is made so in the run, not estimated:

- torch's counter sees no fused attention on the CPU, so FLOPs are taken on the math kernel, and no
  grouped matmul, so the experts' FLOPs are added from their closed form; it sees no fused LSTM of
  oneDNN, so that is switched off.
- A graph counts attention and dropout as GPU kernels do them. Where the CPU has no such kernel (a
  mask that is trained, attention with dropout) the run gets an attention that saves what a flash
  kernel saves, and `native_dropout` for dropout.
- Parameters, buffers and inputs are not activations; nor is what is made of inputs and buffers
  alone (the edge index and its norms, noisy latents, masks), which a graph leaves to each stage to
  make. The run tells these apart op by op and prints them beside the rest.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from rlplace.graph import library
from rlplace.graph.capture import capture
from rlplace.graph.models.named import MODELS
from rlplace.graph.models.shapes import Mixtral
from rlplace.graph.types import Affine, OpGraph, Work

TINY = sorted(name for name in MODELS if name.endswith("-tiny"))
BATCH = 4


@dataclass(frozen=True)
class Case:
    """A tiny model: how it is made, and its graph without layouts."""

    spec: library.Spec
    graph: OpGraph
    module: nn.Module

    @property
    def works(self) -> list[Work]:
        return [self.graph.structure(group.index).work for group in self.graph.groups]


@cache
def case(name: str, dropout: float = 0.0) -> Case:
    spec = library.spec(name, dropout=dropout) if dropout else library.spec(name)
    torch.manual_seed(0)
    module = spec.make()
    with warnings.catch_warnings():
        # nn.LSTM's list of its own weights is put back after the export.
        warnings.filterwarnings("ignore", "The tensor attributes", UserWarning)
        return Case(spec, capture(module, kwargs=spec.example(2), degrees=()), module)


@pytest.mark.parametrize("name", TINY)
def test_parameters_are_the_distinct_trainable_ones(name: str) -> None:
    made = case(name)
    params = list(made.module.parameters())
    assert made.graph.params == sum(p.numel() for p in params if p.requires_grad)
    named = {name for group in made.graph.groups for name in group.params}
    assert {name for name, p in made.module.named_parameters() if p.requires_grad} <= named


@pytest.mark.parametrize("name", TINY)
def test_flops_are_those_of_a_real_run(name: str) -> None:
    made = case(name)
    forward, backward = FlopCounterMode(display=False), FlopCounterMode(display=False)
    with sdpa_kernel(SDPBackend.MATH), _no_fused_lstm():
        with forward:
            loss = made.module(**made.spec.example(BATCH))
        with backward:
            loss.backward()
    experts = _experts_flops(made.spec.shape)
    assert forward.get_total_flops() > 0
    assert sum(w.flops(BATCH) for w in made.works) == forward.get_total_flops() + experts
    measured = backward.get_total_flops() + 2 * experts
    assert sum(w.backward_flops(BATCH) for w in made.works) == measured


@pytest.mark.parametrize("name", TINY)
def test_products_add_up_to_the_flops(name: str) -> None:
    for structure in case(name).graph.structures:
        work = structure.work
        totals = {"forward": Affine(), "backward": Affine()}
        for product in work.products:
            phase = "forward" if product.role == "forward" else "backward"
            totals[phase] = totals[phase] + product.flops
        assert totals == {"forward": work.flops, "backward": work.backward_flops}
        forward = [p for p in work.products if p.role == "forward"]
        assert sum(p.count for p in forward) == work.matmuls
        assert sum(p.moved(BATCH) for p in forward) <= work.moved(BATCH)


def _experts_flops(shape: Any) -> int:
    """Forward FLOPs of the experts: gate, up and down for each token and chosen expert."""
    if not isinstance(shape, Mixtral):
        return 0
    chosen = BATCH * shape.seq_len * shape.top_k
    return shape.layers * chosen * 3 * 2 * shape.hidden * shape.ffn


def test_torch_counts_the_experts_too_where_they_are_batched_matmuls() -> None:
    made = case("mixtral-tiny")
    batched: Any = made.spec.make()
    batched.model.set_experts_implementation("batched_mm")
    counter = FlopCounterMode(display=False)
    with sdpa_kernel(SDPBackend.MATH), counter:
        batched(**made.spec.example(BATCH))
    assert sum(w.flops(BATCH) for w in made.works) == counter.get_total_flops()


@pytest.mark.parametrize("name", TINY)
def test_saved_bytes_are_those_of_a_real_run(name: str, record_property: Any) -> None:
    _compare_saved(name, case(name), record_property)


@pytest.mark.parametrize("name", ["gpt2-tiny", "bert-tiny", "t5-tiny"])
def test_saved_bytes_with_dropout(name: str, record_property: Any) -> None:
    _compare_saved(f"{name} with dropout", case(name, 0.1), record_property)


def _compare_saved(name: str, made: Case, record_property: Any) -> None:
    counted = sum(4 * w.saved(BATCH) + w.saved_bytes(BATCH) for w in made.works)
    measured = measure_saved(made.module, made.spec.example(BATCH))
    ratio = counted / measured.activations
    record_property("counted / measured", round(ratio, 4))
    print(
        f"{name}: {counted:.0f} bytes counted, {measured.activations} measured, ratio {ratio:.4f};"
        f" of inputs and buffers alone {measured.constants}"
    )
    assert ratio == pytest.approx(1.0, abs=0.05)


@dataclass(frozen=True)
class Saved:
    """Bytes that autograd keeps: of activations, and of what inputs and buffers alone give."""

    activations: int
    constants: int


def measure_saved(module: nn.Module, inputs: Mapping[str, Tensor]) -> Saved:
    """Run a module forward and sum the storages that autograd keeps, each once."""
    given = [*module.parameters(), *module.buffers(), *inputs.values()]
    counted = {_key(tensor) for tensor in given}
    sizes: dict[int, int] = {}
    tracker = _Constants({_key(tensor) for tensor in (*module.buffers(), *inputs.values())})

    def keep(tensor: Tensor) -> Tensor:
        tracker.alive.append(tensor.detach())
        if _key(tensor) not in counted:
            sizes[_key(tensor)] = tensor.untyped_storage().nbytes()
        return tensor

    with (
        _as_a_gpu_saves(),
        _no_fused_lstm(),
        torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
        tracker,
    ):
        module(**inputs)
    constants = sum(size for key, size in sizes.items() if key in tracker.constants)
    return Saved(sum(sizes.values()) - constants, constants)


@dataclass
class _Constants(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Follows which storages depend on inputs and buffers only."""

    constants: set[int]
    alive: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        self.alive.append(out)
        sources = {_key(t) for t in _tensors((args, kwargs))}
        drawn = torch.Tag.nondeterministic_seeded in func.tags
        made = {_key(t) for t in _tensors(out)}
        if sources <= self.constants and not drawn:
            self.constants |= made
        else:
            self.constants -= made - (sources & self.constants if func.is_view else set())
        return out


class _Flash(torch.autograd.Function):
    """Attention that is right in its values and saves what a flash kernel saves."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float
    ) -> Tensor:
        scores = query @ key.transpose(-2, -1) * scale
        if mask is not None:
            scores = scores + mask
        # Kernels lay their output out as the query is, here by (batch, row, head, feature).
        out = torch.empty_like(query).copy_(scores.softmax(dim=-1) @ value)
        ctx.save_for_backward(query, key, value, out, scores.logsumexp(dim=-1), mask)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise NotImplementedError("only what forward saves is looked at")


_sdpa = F.scaled_dot_product_attention


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The CPU's fused kernel where it has one, else the stand-in (which drops nothing)."""
    if dropout_p == 0.0 and not (attn_mask is not None and attn_mask.requires_grad):
        return _sdpa(
            query, key, value, attn_mask, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa
        )
    if is_causal:
        rows, columns = query.shape[-2], key.shape[-2]
        attn_mask = torch.full((rows, columns), -torch.inf).triu(1)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    out: Tensor = _Flash.apply(query, key, value, attn_mask, scale)  # type: ignore[no-untyped-call]
    return out


def _dropout(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    return torch.native_dropout(x, p, training)[0] if p and training else x


@contextlib.contextmanager
def _as_a_gpu_saves() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(F, "scaled_dot_product_attention", _attention)
        patch.setattr(F, "dropout", _dropout)
        yield


@contextlib.contextmanager
def _no_fused_lstm() -> Iterator[None]:
    with torch.backends.mkldnn.flags(enabled=False):
        yield


@pytest.mark.parametrize("name", ["t5-tiny", "swin-tiny"])
def test_the_stand_in_attends_as_the_real_one(name: str) -> None:
    made = case(name)
    real = made.module(**made.spec.example(BATCH))
    with _as_a_gpu_saves():
        stood_in = made.module(**made.spec.example(BATCH))
    torch.testing.assert_close(stood_in, real)


def test_what_inputs_alone_give_is_told_apart() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(8))

        def forward(self, x: Tensor) -> Tensor:
            constant = x.exp()
            hidden = constant * self.weight
            return (hidden.sigmoid() + x.new_zeros(x.shape).add_(hidden).exp()).sum()

    saved = measure_saved(Mixed(), {"x": torch.ones(2, 8)})
    assert (saved.activations, saved.constants) == (2 * 2 * 8 * 4, 2 * 8 * 4)


def _tensors(tree: Any) -> list[Tensor]:
    leaves = torch.utils._pytree.tree_leaves(tree)
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


def _key(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
