"""Model types that the library does not contain, each from its own config class alone."""

from collections import Counter
from typing import Any

import pytest

from benchmarks._tiny_types import Unbuildable, class_names, model_types, tiny_config, tiny_model
from rlplace.graph import capture as capture_file
from rlplace.graph.capture import capture
from rlplace.graph.program import Program, export_program

#: Decoders, encoders, transformers and convolutions on images, audio. Small in ops, not in kinds.
TYPES = (
    "opt",
    "qwen3",
    "bloom",
    "distilbert",
    "electra",
    "deberta-v2",
    "deit",
    "dinov2",
    "poolformer",
    "wav2vec2",
)


@pytest.mark.parametrize("model_type", TYPES)
def test_a_model_type_is_captured_grouped_and_sharded(
    model_type: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs: list[Program] = []

    def recording(*args: Any, **kwargs: Any) -> Program:
        programs.append(export_program(*args, **kwargs))
        return programs[-1]

    monkeypatch.setattr(capture_file, "export_program", recording)
    tiny = tiny_model(model_type)
    if model_type == "wav2vec2":
        tiny = tiny.without_labels()  # its CTC loss looks at the values of the labels
    graph = capture(tiny.module, kwargs=tiny.inputs, degrees=(2,))
    # The heuristic has run a backward pass: a parameter without a gradient is not used.
    assert graph.params == sum(p.numel() for p in tiny.module.parameters() if p.grad is not None)
    owners = Counter(op for group in graph.groups for op in group.ops)
    assert set(owners.values()) == {1}
    assert set(owners) == {node.name for node in programs[0].body()}
    assert graph.model_flops(1) > 0
    sharded = [s for s in graph.structures if len(s.layouts_at(2)) > 1]
    assert sharded
    for structure in sharded:
        best = min(structure.layouts_at(2)[1:], key=lambda layout: layout.work.params)
        assert best.work.params <= structure.work.params


def test_every_type_with_an_auto_class_is_known() -> None:
    known = model_types()
    assert len(known) > 300
    assert {"llama", "vit", "wav2vec2", "blip-2"} <= set(known)
    assert class_names("bart")[0] == "BartForConditionalGeneration"
    assert class_names("vit")[0] == "ViTForImageClassification"


def test_sizes_are_shrunk_by_the_names_of_the_fields() -> None:
    config = tiny_config("qwen3")
    assert (config.hidden_size, config.num_hidden_layers, config.num_attention_heads) == (64, 2, 4)
    assert (config.vocab_size, config.head_dim) == (256, 16)
    towers = tiny_config("siglip")
    assert towers.vision_config.num_hidden_layers == towers.text_config.num_hidden_layers == 2


def test_a_type_that_cannot_be_built_says_why() -> None:
    with pytest.raises(Unbuildable, match=r"ImportError|Error"):
        tiny_model("edgetam_vision_model")
