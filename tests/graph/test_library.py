from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from rlplace.errors import InputError, MissingExtraError
from rlplace.graph import library
from rlplace.graph.cache import cache_path, load_graph, store_graph
from rlplace.graph.models.make import empty
from rlplace.graph.models.named import MODELS
from rlplace.graph.models.shapes import FAMILIES

TINY = sorted(name for name in MODELS if name.endswith("-tiny"))
# In training mode it sees the whole batch, so no mean over micro-batches is exact.
BATCH_NORM = {"resnet-tiny"}


@pytest.mark.parametrize("name", TINY)
def test_module_runs_on_its_example_and_trains_all_its_parameters(name: str) -> None:
    spec = library.spec(name)
    torch.manual_seed(0)
    module = spec.make()
    loss = module(**spec.example(2, seed=1))
    assert loss.shape == ()
    loss.backward()
    trained = {n for n, p in module.named_parameters() if p.grad is not None}
    assert trained == {n for n, p in module.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("name", TINY)
def test_loss_is_the_mean_over_equal_micro_batches(name: str) -> None:
    if name in BATCH_NORM:
        pytest.skip("batch norm in training mode sees the whole batch")
    spec = library.spec(name)
    torch.manual_seed(0)
    module, inputs = spec.make(), spec.example(4)
    halves = [{k: v[i : i + 2] for k, v in inputs.items()} for i in (0, 2)]
    mean = sum(module(**half) for half in halves) / 2
    torch.testing.assert_close(module(**inputs), mean)


def test_example_is_seeded_and_inputs_are_distinct_tensors() -> None:
    spec = library.spec("gpt2-tiny")
    first, again, other = spec.example(2, 3), spec.example(2, 3), spec.example(2, 4)
    assert torch.equal(first["input_ids"], again["input_ids"])
    assert not torch.equal(first["input_ids"], other["input_ids"])
    assert first["input_ids"].data_ptr() != first["labels"].data_ptr()


def test_a_family_with_a_shape() -> None:
    graph = library.build(
        "llama",
        layers=1,
        hidden=32,
        heads=4,
        kv_heads=2,
        ffn=48,
        vocab=64,
        tie_embeddings=True,
        seq_len=16,
    )
    assert graph.tokens_per_sample == 16
    attention, mlp, norms = 2 * 32 * 32 + 2 * 32 * 16, 3 * 32 * 48, 3 * 32
    assert graph.params == 64 * 32 + attention + mlp + norms
    assert [size for _, size in graph.tied] == [64 * 32]


def test_untied_variant_has_a_head_of_its_own() -> None:
    tied, untied = library.build("gpt2-tiny"), library.build("gpt2-tiny-untied")
    assert untied.params == tied.params + 256 * 64
    assert untied.tied == ()


def test_source_builds_the_same_graph() -> None:
    graph = library.build("bert-tiny", layers=1)
    assert library.spec(**graph.source).source == graph.source  # type: ignore[arg-type]
    again = library.build(**graph.source, cache=False)  # type: ignore[arg-type]
    assert again.fingerprint == graph.fingerprint


@pytest.mark.parametrize(
    ("name", "millions"),
    [
        ("gpt2", 124.44),
        ("gpt2-demo", 23.18),
        ("gpt3-175b", 174604.26),
        ("llama-3-405b", 405853.39),
        ("llama-3.2-1b", 1235.81),
        ("qwen2-72b", 72706.20),
        ("swin-base", 87.77),
        ("swin-large", 196.53),
        ("sd-1.5-unet", 859.52),
        ("sd-2.1-unet", 865.91),
        ("gcn-arxiv", 0.110),
        ("gat-cora", 0.092),
        ("clip-vit-b-32", 151.28),
        ("clip-vit-l-14", 427.62),
        ("whisper-large-v3", 1543.49),
        ("lstm-ptb-large", 66.03),
        ("llama-3-8b", 8030.26),
        ("llama-2-7b", 6738.42),
        ("qwen2-1.5b", 1543.71),
        ("mixtral-8x7b", 46702.79),
        ("resnet-50", 25.557),
        ("bert-large", 335.17),
    ],
)
def test_published_sizes(name: str, millions: float) -> None:
    with torch.device("meta"):
        module = library.spec(name).make()
    size = sum(p.numel() for p in module.parameters()) / 1e6
    assert size == pytest.approx(millions, abs=0.006)


def test_dropout_is_off_unless_asked_for() -> None:
    with torch.device("meta"):
        plain, noisy = (
            library.spec("gpt2-tiny").make(),
            library.spec("gpt2-tiny", dropout=0.1).make(),
        )
    rates = [
        {m.p for m in module.modules() if isinstance(m, torch.nn.Dropout)}
        for module in (plain, noisy)
    ]
    assert rates == [{0.0}, {0.1}]


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("gtp2", {}, "gpt2"),
        ("llama-3-80b", {}, "llama-3-8b"),
        ("gpt2", {"layer": 2}, "layers"),
        ("resnet-50", {"seq_len": 128}, "resnet has no such argument"),
        ("resnet-50-untied", {}, "tie_embeddings"),
        ("llama", {"heads": 0}, "at least 1"),
        ("llama", {"layers": 2.5}, "an integer"),
        ("llama", {"hidden": 100, "heads": 32}, "divide"),
        ("llama", {"heads": 32, "kv_heads": 5}, "divide"),
        ("gpt2", {"dropout": 1.5}, r"in \[0, 1\)"),
        ("gpt2", {"tie_embeddings": "yes"}, "true or false"),
        ("resnet", {"depths": "3,x"}, "3,4,6,3"),
        ("resnet", {"depths": "3,4"}, "as many"),
        ("vit", {"image": 30}, "patch"),
        ("mixtral", {"top_k": 9}, "experts"),
        ("llama", {"hidden": 96, "heads": 32}, r"even for rotary positions .*24\)"),
        ("swin", {"heads": "5,8,16,32"}, r"divide the width 128 .*4\)"),
        ("swin", {"heads": "4,8"}, "as many"),
        ("swin", {"window": 9}, r"last stage, 7 patches .*7\)"),
        ("unet", {"image": 30}, r"multiple of 8.*32\)"),
        ("unet", {"widths": "320,640,1280,1290"}, r"norm_groups.*1280\)"),
        ("unet", {"transformers": "1,x,1,0"}, "not negative"),
        ("gcn", {"hidden": 10, "heads": 4, "attention": True}, r"divide.*5\)"),
        ("clip", {"text_heads": 7}, r"text_hidden=512.*8\)"),
        ("llava", {"vision_heads": 5}, r"vision_hidden=1024.*4\)"),
        ("whisper", {"hidden": 15, "heads": 5}, r"even.*16\)"),
        ("lstm", {"width": 100, "tie_embeddings": True}, r"hidden=1500.*1500\)"),
        ("lstm", {"seq_len": 1}, r"the next one.*2\)"),
    ],
)
def test_bad_request_is_refused(
    name: str, shape: dict[str, int | float | str], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        library.spec(name, **shape)  # type: ignore[arg-type]


def test_missing_transformers_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(MissingExtraError, match=r"pip install rlplace\[models\]"):
        library.spec("gpt2-tiny").make()


def test_every_family_has_a_tiny_model_and_ten_families_a_large_one() -> None:
    assert {MODELS[name][0] for name in TINY} == set(FAMILIES)
    large = [name for name in MODELS if not name.endswith(("-tiny", "-demo"))]
    assert len(large) >= 30
    assert len({MODELS[name][0] for name in large}) >= 11


@pytest.mark.parametrize("name", ["gpt2-tiny", "unet-tiny", "dlrm-tiny"])
def test_dtype_is_that_of_weights_and_floating_point_inputs(name: str) -> None:
    spec = library.spec(name)
    module, inputs = spec.make(dtype="bfloat16"), spec.example(2, dtype="bfloat16")
    floats = [t for t in (*module.parameters(), *inputs.values()) if t.is_floating_point()]
    assert {t.dtype for t in floats} == {torch.bfloat16}
    assert module(**inputs).isfinite()
    with pytest.raises(InputError, match="bfloat16"):
        spec.make(dtype="bf16")  # type: ignore[arg-type]


@pytest.mark.parametrize("name", TINY)
def test_inputs_without_storage_are_like_the_drawn_ones(name: str) -> None:
    spec = library.spec(name)
    drawn, without = spec.example(3), empty(spec.shape, 3)
    assert list(drawn) == list(without)
    for key in drawn:
        assert (drawn[key].shape, drawn[key].dtype) == (without[key].shape, without[key].dtype)


def test_every_named_model_has_a_legal_shape() -> None:
    for name, (family, shape) in MODELS.items():
        assert isinstance(shape, FAMILIES[family])
        assert library.spec(name).shape == shape


def test_cache_returns_the_same_graph_and_survives_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RLPLACE_CACHE", str(tmp_path))
    graph = library.build("dlrm-tiny")
    (path,) = tmp_path.glob("*.json")
    assert load_graph(path) == graph
    path.write_bytes(path.read_bytes()[:100])
    with pytest.warns(UserWarning, match="damaged"):
        again = library.build("dlrm-tiny")
    assert again == graph == load_graph(path)
    assert list(tmp_path.iterdir()) == [path]


def test_cache_tells_requests_apart_and_an_unwritable_folder_is_a_warning(tmp_path: Path) -> None:
    paths = {cache_path({"name": "gpt2", "layers": layers}) for layers in (1, 2)}
    assert len(paths) == 2
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.warns(UserWarning, match="not cached"):
        store_graph(blocked / "graph.json", library.build("dlrm-tiny"))


def test_a_hit_imports_neither_torch_nor_transformers() -> None:
    library.build("dlrm-tiny")
    code = (
        "import sys; from rlplace.graph import library; g = library.build('dlrm-tiny');"
        "print(g.fingerprint, [m for m in ('torch', 'transformers') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.split(maxsplit=1) == [library.build("dlrm-tiny").fingerprint, "[]\n"]
