"""One small module of each kind that a user may bring; what is captured is held to eager."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from rlplace.errors import CaptureError
from rlplace.graph.capture import capture
from rlplace.graph.program import Program, export_program, extract
from rlplace.graph.tracing.twins import outputs_of, with_loss
from rlplace.graph.types import Affine, OpGraph

graph_of = functools.partial(capture, degrees=())


def rerun(program: Program, module: nn.Module, call: list[Any]) -> tuple[Tensor, ...]:
    """The exported program as one piece, on the module's own states."""
    piece = extract(program, [n.name for n in program.nodes], program.outputs, device="cpu")
    states = dict(module.named_parameters()) | dict(module.named_buffers())
    states |= {k: v for k, v in program.exported.constants.items() if isinstance(v, Tensor)}
    given = dict(zip(program.inputs, call, strict=True))
    outputs: tuple[Tensor, ...] = piece.module(
        *(states[name] for _, name in piece.states), *(given[name] for name in piece.inputs)
    )
    return outputs


def agrees(
    module: nn.Module, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
) -> OpGraph:
    """Capture; the program gives eager's outputs and gradients, and every parameter is counted."""
    call = dict(kwargs or {})
    program = export_program(module, args, call)
    torch.manual_seed(1)
    expected = outputs_of(module(*args, **call))
    torch.manual_seed(1)
    found = rerun(program, module, program.unflatten(args, call))
    params = [p for p in module.parameters() if p.requires_grad]
    for got, want in zip(found, expected, strict=True):
        torch.testing.assert_close(got, want)
    if params:
        loss, other = (sum(t.double().sum() for t in ts) for ts in (found, expected))
        gradients = []
        for total in (loss, other):
            module.zero_grad()
            total.backward()  # type: ignore[union-attr]
            gradients.append([None if p.grad is None else p.grad.clone() for p in params])
        for got, want in zip(*gradients, strict=True):
            torch.testing.assert_close(got, want, rtol=2e-5, atol=2e-5)
    graph = graph_of(module, args, call)
    assert graph.params == sum(p.numel() for p in params)
    return graph


class Net(nn.Module):
    """Two linear layers around what a test does."""

    def __init__(self, middle: Callable[..., Any], width: int = 8) -> None:
        super().__init__()
        self.a = nn.Linear(width, width)
        self.b = nn.Linear(width, width)
        self.middle = middle

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.middle(self, *args, **kwargs)


@dataclass
class Scores:
    scores: Tensor
    hidden: Tensor | None
    note: str = ""


X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
_LINEAR = 2 * 8 * 8


@pytest.mark.parametrize(
    "shape",
    [
        lambda h, y: (y, h),
        lambda h, y: {"y": y, "aux": [h, None, 3]},
        lambda h, y: Scores(y, h, "note"),
        lambda h, y: [Scores(y, None), {"h": h}],
    ],
    ids=["tuple", "dict", "dataclass", "nested"],
)
def test_outputs_without_a_loss_are_counted_with_a_gradient_each(shape: Any) -> None:
    def middle(net: Net, x: Tensor) -> Any:
        hidden = net.a(x)
        return shape(hidden, net.b(hidden.relu()))

    graph = agrees(Net(middle), (X,))
    # Forward twice, both weights' gradients, and one input's.
    assert graph.model_flops == Affine(0.0, 5 * _LINEAR)


def test_what_comes_beside_a_loss_is_no_output() -> None:
    def middle(net: Net, x: Tensor) -> Any:
        hidden = net.a(x)
        return {"logits": net.b(x), "loss": hidden.square().mean()}

    program = export_program(Net(middle), (X,))
    assert len(program.outputs) == 1
    graph = graph_of(Net(middle), (X,))
    # Forward of both, but the gradient of the weight of the loss's own layer alone.
    assert graph.model_flops == Affine(0.0, 3 * _LINEAR)


def test_inputs_may_be_nested_keywords_variadic_or_no_tensors() -> None:
    def middle(net: Net, batch: Any, *more: Tensor, scale: float = 1.0, **rest: Any) -> Any:
        out = net.a(batch["x"]) * scale + batch["pair"][1]
        for tensor in more:
            out = out + net.b(tensor)
        if rest["mode"] == "mean" and not rest["flag"]:
            out = out * rest["extra"]["weight"].unsqueeze(-1)
        return out.mean()

    batch = {"x": X, "pair": (X, X + 1)}
    options = {"scale": 2.0, "mode": "mean", "flag": False, "extra": {"weight": X[:, 0]}}
    agrees(Net(middle), (batch, X, X * 2), {**options, "none": None})


def test_arguments_that_forward_does_not_take_are_refused() -> None:
    with pytest.raises(ValueError, match="does not fit forward"):
        graph_of(nn.Linear(8, 8), (X, X))


def _square(output: Tensor, target: Tensor, weight: float = 1.0) -> Tensor:
    return weight * (output - target).square().mean()


class _Weighted(nn.Module):
    """A loss with a buffer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(8))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        scale = self.get_buffer("scale")
        return ((output - target) * scale).square().mean()


@pytest.mark.parametrize(
    ("loss", "targets"),
    [
        (_square, (X, 0.5)),
        (_square, {"target": X, "weight": 2.0}),
        (nn.MSELoss(), X),
        (_Weighted(), (X,)),
    ],
)
def test_a_loss_outside_gives_the_graph_of_a_loss_inside(loss: Any, targets: Any) -> None:
    inside = graph_of(Net(lambda net, x, y: _square(net.b(net.a(x).relu()), y)), (X, X))
    module = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    before = sorted(module.state_dict())
    graph = graph_of(module, (X,), loss=loss, targets=targets)
    assert graph.model_flops == inside.model_flops
    assert {"0.weight", "2.bias"} <= {name for group in graph.groups for name in group.params}
    assert sorted(module.state_dict()) == before
    assert "forward" not in vars(module)


def test_a_module_with_a_loss_behind_it_runs_and_is_captured_alike() -> None:
    module = with_loss(nn.Sequential(nn.Linear(8, 8)), _Weighted())
    agrees(module, (X,), {"targets": X})
    assert sorted(module.state_dict()) == ["0.bias", "0.weight", "loss.scale"]


def test_targets_without_a_loss_are_refused() -> None:
    with pytest.raises(ValueError, match="targets need a loss"):
        graph_of(nn.Linear(8, 8), (X,), targets=X)


def test_dropout_batch_norm_and_buffers() -> None:
    layers = (nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 3))
    module = nn.Sequential(*layers)
    graph = graph_of(module, (X,))
    assert graph.params == sum(p.numel() for p in module.parameters())
    states = {name for group in graph.groups for name in group.params}
    assert "1.running_mean" in states
    # A mask of one byte an element, and a boolean ReLU mask is none.
    kept = sum(graph.structure(g.index).work.saved_bytes(4) for g in graph.groups)
    assert kept == 4 * 16


class LoraLinear(nn.Module):
    def __init__(self, width: int, rank: int) -> None:
        super().__init__()
        self.base = nn.Linear(width, width).requires_grad_(False)
        self.down = nn.Linear(width, rank, bias=False)
        self.up = nn.Linear(rank, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.base(x) + 2.0 * self.up(self.down(x))
        return out


def test_lora_trains_its_own_matrices_and_passes_gradients_through_the_frozen_ones() -> None:
    graph = agrees(nn.Sequential(*(LoraLinear(8, 2) for _ in range(3))), (X,))
    work = [graph.structure(group.index).work for group in graph.groups]
    assert sum(w.params for w in work) == 3 * 2 * 16
    assert sum(w.frozen_params for w in work) == 3 * 72
    base, low = _LINEAR, 2 * 8 * 2
    forward = 3 * (base + 2 * low)
    # No gradient of a frozen weight; none of the input of the first layer.
    backward = (3 * low) + 2 * (base + 4 * low)
    assert graph.model_flops == Affine(0.0, forward + backward)


def test_peft_of_a_llama() -> None:
    peft = pytest.importorskip("peft")
    from transformers import LlamaConfig, LlamaForCausalLM

    shape: dict[str, Any] = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "vocab_size": 64,
    }
    heads: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(**shape, **heads))
    whole = sum(p.numel() for p in model.parameters())
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    adapted = peft.get_peft_model(model, config).train()
    ids = torch.randint(0, 64, (2, 8))
    graph = graph_of(adapted, (), {"input_ids": ids, "labels": ids.clone()})
    work = [graph.structure(group.index).work for group in graph.groups]
    trainable = sum(p.numel() for p in adapted.parameters() if p.requires_grad)
    assert 0 < graph.params == trainable < whole
    buffers = sum(b.numel() for b in adapted.buffers())
    assert whole <= sum(w.frozen_params for w in work) <= whole + buffers
    # Activation gradients flow back to the first adapter; no frozen weight has a gradient.
    forward = sum(w.flops(1) for w in work)
    backward = sum(w.backward_flops(1) for w in work)
    assert 0.5 * forward < backward < 1.2 * forward


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_counts_do_not_depend_on_the_dtype(dtype: torch.dtype) -> None:
    module = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 3))
    plain, cast = graph_of(module, (X,)), graph_of(module.to(dtype), (X.to(dtype),))
    for a, b in zip(plain.groups, cast.groups, strict=True):
        one, two = plain.structure(a.index).work, cast.structure(b.index).work
        assert (one.flops, one.backward_flops, one.params) == (
            two.flops,
            two.backward_flops,
            two.params,
        )
        assert one.moved == two.moved
        assert one.saved_bytes == two.saved_bytes
    assert [edge.floats for edge in plain.edges] == [edge.floats for edge in cast.edges]


def test_autocast_regions_are_traced_in_the_modules_own_dtype() -> None:
    def middle(net: Net, x: Tensor, cast: bool) -> Any:
        if not cast:
            return net.b(net.a(x)).float().sum()
        with torch.autocast(x.device.type, dtype=torch.bfloat16):
            out = net.b(net.a(x))
        return out.float().sum()

    plain, cast = (graph_of(Net(middle), (X, given)) for given in (False, True))
    assert plain.structures == cast.structures


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoint_regions_are_plain_ops_with_gradients(reentrant: bool) -> None:
    def middle(net: Net, x: Tensor) -> Any:
        hidden = net.a(x)
        out: Tensor = checkpoint(lambda y: torch.relu(net.b(y)), hidden, use_reentrant=reentrant)
        return out.sum()

    graph = agrees(Net(middle), (X,))
    assert graph.model_flops == Affine(0.0, 5 * _LINEAR)


def test_gradient_checkpointing_of_transformers() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=32, n_positions=8)
    config.use_cache = False
    ids = torch.randint(0, 32, (2, 8))
    call = {"input_ids": ids, "labels": ids.clone()}
    model = GPT2LMHeadModel(config).train()
    plain = graph_of(model, (), call)
    model.gradient_checkpointing_enable({"use_reentrant": True})
    assert graph_of(model, (), call).structures == plain.structures


def test_no_gradient_flows_back_through_a_no_grad_region() -> None:
    def middle(net: Net, x: Tensor) -> Any:
        with torch.no_grad():
            hidden = torch.relu(net.a(x))
        return net.b(hidden).sum()

    graph = agrees(Net(middle), (X,))
    # Two forwards, the gradient of the second weight.
    assert graph.model_flops == Affine(0.0, 3 * _LINEAR)


def test_spectral_and_weight_norm() -> None:
    norm = nn.utils.parametrizations
    agrees(
        nn.Sequential(
            norm.weight_norm(nn.Linear(8, 8)), norm.spectral_norm(nn.Linear(8, 8))
        ).eval(),
        (X,),
    )


class Recurrent(nn.Module):
    def __init__(self, kind: Any, **options: Any) -> None:
        super().__init__()
        self.rnn = kind(8, 16, 2, **options)
        self.head = nn.Linear(16 * (1 + self.rnn.bidirectional), 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.rnn(x)[0])
        return out


@pytest.mark.parametrize(("kind", "gates"), [(nn.RNN, 1), (nn.LSTM, 4), (nn.GRU, 3)])
def test_recurrent_networks_with_the_batch_in_dim_1(kind: Any, gates: int) -> None:
    graph = graph_of(Recurrent(kind), (torch.randn(3, 4, 8),), batch_dim=1)
    first, hidden, head = 2 * gates * 16 * 8, 2 * gates * 16 * 16, 2 * 16 * 4
    forward = 3 * (first + 3 * hidden + head)
    # No gradient of the input, nor of the two layers' first states.
    assert graph.model_flops == Affine(0.0, 3 * forward - 3 * first - 2 * hidden)


def test_a_recurrent_network_with_the_batch_first() -> None:
    agrees(Recurrent(nn.GRU, batch_first=True, bidirectional=True), (torch.randn(4, 3, 8),))


@pytest.mark.parametrize("dims", [1, 2, 3])
def test_convolutions(dims: int) -> None:
    conv = getattr(nn, f"Conv{dims}d")(3, 8, 3, padding=1)
    pool = getattr(nn, f"MaxPool{dims}d")(2)
    up = getattr(nn, f"ConvTranspose{dims}d")(8, 4, 2, stride=2)
    module = nn.Sequential(conv, nn.ReLU(), pool, up, nn.Flatten(), nn.Linear(4 * 4**dims, 2))
    agrees(module, (torch.randn(2, 3, *[4] * dims),))


def test_embedding_bags_with_and_without_offsets() -> None:
    module = nn.EmbeddingBag(32, 8, mode="sum")
    agrees(module, (torch.randint(0, 32, (4, 6)),))
    call = (torch.randint(0, 32, (12,)), torch.tensor([0, 3, 6, 9]))
    graph = graph_of(module, call, batch_dim={"input": None, "offsets": 0})
    assert graph.params == 32 * 8


@pytest.mark.parametrize("kind", ["GCNConv", "GATConv", "SAGEConv", "GINConv"])
def test_graph_networks(kind: str) -> None:
    layers = pytest.importorskip("torch_geometric.nn")
    conv = getattr(layers, kind)

    def make(width: int, out: int) -> Any:
        return conv(nn.Linear(width, out)) if kind == "GINConv" else conv(width, out)

    class Gnn(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = make(8, 16), make(16, 4)

        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            out: Tensor = self.second(self.first(x, edge_index).relu(), edge_index)
            return out

    edges = torch.randint(0, 10, (2, 30), generator=torch.Generator().manual_seed(0))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="what index picks")
        graph = agrees(Gnn(), (torch.randn(10, 8), edges))
    assert graph.model_flops.per_sample > 0


def test_two_towers_with_a_contrastive_loss_warn_that_it_is_no_line() -> None:
    class Towers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.image, self.text = nn.Linear(8, 4), nn.Linear(6, 4)

        def forward(self, image: Tensor, text: Tensor) -> Tensor:
            scores = self.image(image) @ self.text(text).T
            # len() of a tensor makes a number of the batch; it is kept symbolic.
            return F.cross_entropy(scores, torch.arange(len(scores), device=scores.device))

    with pytest.warns(UserWarning, match="in proportion to the batch"):
        graph = graph_of(Towers(), (X, torch.randn(4, 6)))
    for batch in (2, 3):
        # Forward, two weights; the scores, forward and for both factors.
        expected = 2 * (2 * batch * 8 * 4 + 2 * batch * 6 * 4) + 3 * (2 * batch * batch * 4)
        assert graph.model_flops(batch) == expected


def test_unet_with_skips() -> None:
    class Unet(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.down = nn.Conv2d(3, 8, 3, padding=1)
            self.mid = nn.Conv2d(8, 16, 3, padding=1, stride=2)
            self.up = nn.ConvTranspose2d(16, 8, 2, stride=2)
            self.out = nn.Conv2d(16, 3, 3, padding=1)

        def forward(self, x: Tensor, t: Tensor) -> Tensor:
            first = F.silu(self.down(x) + t[:, None, None, None])
            up = self.up(F.silu(self.mid(first)))
            out: Tensor = self.out(torch.cat([up, first], 1))
            return out

    agrees(Unet(), (torch.randn(2, 3, 8, 8), torch.rand(2)))


def test_mixture_of_experts_in_dense_form() -> None:
    class Moe(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.router = nn.Linear(8, 4)
            self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

        def forward(self, x: Tensor) -> Tensor:
            top, chosen = self.router(x).softmax(-1).topk(2, -1)
            out = torch.zeros_like(x)
            for index, expert in enumerate(self.experts):
                weight = ((chosen == index) * top).sum(-1, keepdim=True)
                out = out + expert(x) * weight
            return out

    agrees(Moe(), (torch.randn(4, 5, 8),))


def test_writes_in_place_into_activations_and_their_views() -> None:
    def middle(net: Net, x: Tensor) -> Tensor:
        hidden = net.a(x)
        hidden[:, :4].mul_(2.0)
        hidden += x
        hidden[:, 1] = 0
        out: Tensor = net.b(F.relu_(hidden))
        return out

    agrees(Net(middle), (X,))


def test_literal_constants_on_the_inputs_device_keep_their_values() -> None:
    def middle(net: Net, x: Tensor) -> Tensor:
        scale = torch.tensor([1.0, 2.0, 3.0], device=x.device)
        out: Tensor = net.b(net.a(x))[:, [2, 0, 5]] * scale + torch.ones(3)
        return out

    agrees(Net(middle), (X,))


def test_what_a_mask_picks_is_counted_as_everything() -> None:
    def middle(net: Net, x: Tensor) -> Tensor:
        hidden = net.a(x)
        out: Tensor = net.b(hidden[hidden.sum(-1) > 0])
        return out.sum()

    with pytest.warns(UserWarning, match="as if it picked everything"):
        graph = graph_of(Net(middle), (torch.randn(4, 3, 8),))
    assert graph.model_flops == Affine(0.0, 3 * 5 * _LINEAR)


def test_a_backward_of_ones_own_is_warned_about() -> None:
    class Reverse(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            return -grads[0]

    net = Net(lambda net, x: Reverse.apply(net.a(x)))  # type: ignore[no-untyped-call]
    with pytest.warns(UserWarning, match="backward of .*Reverse"):
        graph_of(net, (X,))


@pytest.mark.parametrize("name", ["cond", "while_loop"])
def test_graphs_inside_of_graphs_are_refused_with_a_way_out(name: str) -> None:
    from torch._higher_order_ops.while_loop import while_loop

    def cond(net: Net, x: Tensor) -> Any:
        return torch.cond(x.sum() > 0, net.a, net.b, (x,))

    def loop(net: Net, x: Tensor) -> Any:
        start = (torch.tensor(0), x)
        return while_loop(  # type: ignore[no-untyped-call]
            lambda i, _: i < 3, lambda i, h: (i + 1, net.a(h)), start
        )[1]

    with pytest.raises(CaptureError, match=f"^{name} .*Way out"):
        graph_of(Net(cond if name == "cond" else loop), (X,))


def test_sequences_that_differ_in_length_alone_have_the_batch_in_dim_1() -> None:
    def middle(net: Net, x: Tensor, y: Tensor) -> Tensor:
        return torch.cat([net.a(x), net.b(y)]).sum(0)

    call = (torch.randn(5, 4, 8), torch.randn(6, 4, 8))
    with pytest.warns(UserWarning, match="dim 1 of all inputs"):
        found = graph_of(Net(middle), call)
    assert found.structures == graph_of(Net(middle), call, batch_dim=1).structures
    assert found.model_flops == Affine(0.0, 2 * 11 * _LINEAR)


def test_two_rows_that_are_as_many_as_the_batch_become_static() -> None:
    def middle(net: Net, x: Tensor, pair: Tensor) -> Tensor:
        low, high = pair
        out: Tensor = net.a(x) * low + high
        return out

    with pytest.warns(UserWarning, match="fixes the first dim of args_1"):
        graph = graph_of(Net(middle), (torch.randn(2, 8), torch.randn(2, 8)))
    assert graph.model_flops == Affine(0.0, 2 * _LINEAR)
