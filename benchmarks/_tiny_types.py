"""A tiny model of any transformers model type, from its config class alone, with inputs.

No type is known by name: sizes are recognised by the names of the config's fields, inputs by the
names of the arguments of `forward`. Where a guess does not run, the next one is tried.
"""

from __future__ import annotations

import contextlib
import inspect
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice, product
from typing import Any

import torch
from torch import Tensor, nn

BATCH, LENGTH, VOCAB = 2, 8, 256
#: Parameters of the largest model that is tried.
MOST_PARAMS = 60_000_000
_MOST_TRIES = 12
#: Names of `transformers.models.auto.modeling_auto`, the one with the fullest loss first.
_SEQ_TO_SEQ = ("MODEL_FOR_SPEECH_SEQ_2_SEQ", "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM")
_HEADS = (
    "MODEL_FOR_IMAGE_TEXT_TO_TEXT",
    "MODEL_FOR_ZERO_SHOT_IMAGE_CLASSIFICATION",
    "MODEL_FOR_MASKED_LM",
    "MODEL_FOR_CAUSAL_LM",
    "MODEL_FOR_IMAGE_CLASSIFICATION",
    "MODEL_FOR_VIDEO_CLASSIFICATION",
    "MODEL_FOR_CTC",
    "MODEL_FOR_AUDIO_CLASSIFICATION",
    "MODEL_FOR_SEQUENCE_CLASSIFICATION",
    "MODEL_FOR_TIME_SERIES_PREDICTION",
    "MODEL_FOR_SEMANTIC_SEGMENTATION",
    "MODEL_FOR_DEPTH_ESTIMATION",
    "MODEL_FOR_IMAGE_TO_IMAGE",
    "MODEL",
    "MODEL_FOR_PRETRAINING",
    "MODEL_FOR_BACKBONE",
)
_BIN_FIELDS = (
    "num_mel_bins",
    "feature_size",
    "input_feat_per_channel",
    "feature_projection_input_dim",
    "input_size",
    "input_dim",
)
_PLACEHOLDER_FIELDS = (
    "image_token_id",
    "image_token_index",
    "audio_token_id",
    "audio_token_index",
)
#: Heads whose labels are tokens in the place of the inputs.
_TOKEN_LABELS = (
    "ForCausalLM",
    "ForMaskedLM",
    "ConditionalGeneration",
    "LMHeadModel",
    "PreTraining",
)


class Unbuildable(Exception):
    """The type cannot be built from its config alone; the message says why."""


@dataclass(frozen=True)
class Tiny:
    """A tiny model that runs.

    Args:
        module: Returns a scalar loss.
        inputs: Its keyword inputs.
        name: Of its class.
        loss: ``own``, or ``mean of outputs`` where the model has none.
        sizes: Which guess of the sizes was taken.
    """

    module: nn.Module
    inputs: dict[str, Tensor]
    name: str
    loss: str
    sizes: str

    def without_labels(self) -> Tiny:
        """The same model with the mean of its outputs as its loss."""
        inputs = {name: tensor for name, tensor in self.inputs.items() if name != "labels"}
        return replace(self, inputs=inputs, loss="mean of outputs")


class Trained(nn.Module):
    """A model as a module that returns its loss, or the mean square of its outputs."""

    def __init__(self, model: nn.Module, fixed: dict[str, Any]) -> None:
        super().__init__()
        self.model = model
        self.fixed = fixed

    def forward(self, **inputs: Tensor) -> Tensor:
        """The loss."""
        found = self.model(**inputs, **self.fixed)
        loss = found.get("loss") if hasattr(found, "get") else None
        if isinstance(loss, Tensor) and loss.ndim == 0:
            return loss
        outputs = [t for t in _tensors(found) if t.is_floating_point() and t.requires_grad]
        return torch.stack([t.float().pow(2).mean() for t in outputs]).mean()


def model_types() -> list[str]:
    """Every model type of transformers that an auto class can make a model of."""
    from transformers import CONFIG_MAPPING

    return [name for name in CONFIG_MAPPING if class_names(name)]


def class_names(model_type: str) -> list[str]:
    """The classes of a type, the preferred first."""
    from transformers.models.auto import modeling_auto

    found = []
    heads = [*_SEQ_TO_SEQ, *_HEADS]
    tables = [name for name in vars(modeling_auto) if name.endswith("_MAPPING_NAMES")]
    rest = sorted(set(tables) - {f"{head}_MAPPING_NAMES" for head in heads})
    for table in [*(f"{head}_MAPPING_NAMES" for head in heads), *rest]:
        names = getattr(modeling_auto, table).get(model_type, ())
        if table != "CONFIG_MAPPING_NAMES":
            found += [names] if isinstance(names, str) else list(names)
    return list(dict.fromkeys(found))


def tiny_model(model_type: str) -> Tiny:
    """The first guess of class, sizes and inputs that runs on the CPU.

    Raises:
        Unbuildable: If none does; the message has the last error of the first guess.
    """
    warnings.filterwarnings("ignore")
    errors: list[str] = []
    for sizes in ("tiny", "broad", "shallow", "deep"):
        for name in class_names(model_type)[:2]:
            try:
                model = _build(model_type, name, sizes)
                return _running(model, name, sizes)
            except Exception as error:  # any error of any model: the next guess may do
                text = " ".join(str(error).split())
                errors.append(f"{type(error).__name__}: {text[:300]}")
    raise Unbuildable(errors[0] if errors else "no class")


def _build(model_type: str, name: str, sizes: str) -> nn.Module:
    import transformers

    kind = getattr(transformers, name)
    config = tiny_config(model_type, sizes)
    with torch.device("meta"):
        count = sum(p.numel() for p in kind(config).parameters())
    if count > MOST_PARAMS:
        raise Unbuildable(f"{count / 1e6:.0f} million parameters after shrinking")
    torch.manual_seed(0)
    made: nn.Module = kind(config).train()
    return made


def _running(model: nn.Module, name: str, sizes: str) -> Tiny:
    """With the first inputs that the model takes."""
    fixed = _fixed(model)
    last: Exception | None = None
    for inputs in islice(guessed_inputs(model), _MOST_TRIES):
        try:
            module, loss = Trained(model, fixed), "own"
            found = model(**inputs, **fixed)
            has = hasattr(found, "get") and isinstance(found.get("loss"), Tensor)
            if not (has and found["loss"].ndim == 0):
                loss = "mean of outputs"
            module(**inputs).backward()
            return Tiny(module, inputs, name, loss, sizes)
        except Exception as error:
            last = last or error
            for tokens in _tokens_wanted(str(error), model.config):
                more = _with_tokens(model, inputs, tokens)
                with contextlib.suppress(Exception):
                    module(**more).backward()
                    return Tiny(module, more, name, loss, sizes)
    raise last or Unbuildable("no inputs are known for its forward")


def tiny_config(model_type: str, sizes: str = "tiny") -> Any:
    """A config of a type whose known fields are small."""
    from transformers import AutoConfig

    default = AutoConfig.for_model(model_type)
    changes = _changes(default, sizes)
    try:
        config = AutoConfig.for_model(model_type, **changes)
    except Exception:
        changes |= _truncated_lists(default, changes)
        config = AutoConfig.for_model(model_type, **changes)
    _settle(config)
    return config


def _changes(config: Any, sizes: str) -> dict[str, Any]:
    """What to hand to the config's class."""
    found: dict[str, Any] = {}
    for name, value in vars(config).items():
        if name.startswith("_") or isinstance(value, bool):
            continue
        small = _small(name, value, config, sizes)
        if small is not value and small != value:
            found[name] = small
    return found


def _small(name: str, value: Any, config: Any, sizes: str) -> Any:
    """A small value of a field."""
    if hasattr(value, "to_dict"):
        return _part(value, sizes)
    if isinstance(value, int):
        return _small_number(name, value, config, sizes)
    if _is_list(value) and re.search(r"depths$", name) and sizes != "deep":
        return [min(depth, 2) if isinstance(depth, int) else depth for depth in value]
    if isinstance(value, dict) and "mrope_section" in value and sizes == "tiny":
        return value | {"mrope_section": [4, 2, 2]}
    if value is None and re.search(r"^(image|audio)_token_(id|index)$", name):
        return VOCAB - 2
    return _UNSET.get(name) if value is None else value


def _part(part: Any, sizes: str) -> dict[str, Any]:
    """A config inside a config: what its owner set, and what becomes small."""
    if part.model_type == "timm_backbone":
        return _resnet(part)
    own = {k: v for k, v in part.to_diff_dict().items() if k not in _NOT_HANDED}
    plain = {k: v for k, v in own.items() if isinstance(v, int | float | str | bool)}
    return {**plain, "model_type": part.model_type, **_changes(part, sizes)}


def _resnet(backbone: Any) -> dict[str, Any]:
    """A ResNet in the place of a backbone of timm, which would be downloaded."""
    sizes = {"embedding_size": 16, "hidden_sizes": [32, 64, 64, 128], "depths": [1, 1, 1, 1]}
    indices = [i for i in (backbone.out_indices or [4]) if 0 < i <= 4] or [4]
    return {"model_type": "resnet", "out_indices": indices, **sizes}


#: Fields that some configs leave to the user.
_UNSET = {"vocab_size": VOCAB, "prediction_length": 8, "num_experts_per_tok": 2}
_NOT_HANDED = ("transformers_version", "dtype", "architectures", "_name_or_path")
_HEAD_COUNTS = r"(^|_)(n_?)?heads?$"
_WIDTHS = (
    r"^(\w*_)?(hidden_size|hidden_dim|d_model|n_embd|embed_dim|embedding_size|embed_size|emb_dim|"
    r"projection_dim|embedding_dim|model_dim|word_embed_proj_dim|width|dim)$"
)
#: In names that end as if they were a number of layers, and are not.
_NO_DEPTH = r"feat_extract|every|start|period|conv|from|skip|out_|adapter|upsample|norm|index"
_ALL, _MOST = ("tiny", "broad", "shallow", "deep"), ("tiny", "broad", "deep")
#: What a field is, by its name; the largest value that is left to it; in which guesses. The first
#: that fits counts.
_LARGEST: tuple[tuple[str, int, tuple[str, ...]], ...] = (
    (
        r"(feat_extract|every|start|period|conv|from|skip|out_|adapter|upsample|norm|index).*",
        -1,
        (),
    ),
    (r"(^|.*_)(n_?)?(layers?|blocks?|depth)$", 2, ("tiny", "broad", "shallow")),
    (r".*vocab_size$", VOCAB, _ALL),
    (r"(n_routed_experts|(moe_)?num_experts|num_local_experts|n_experts)$", 4, _ALL),
    (r".*(experts_per_tok|top_k_experts|moe_topk|moe_k|num_selected_experts)$|top_k$", 2, _ALL),
    (r"(n_group|topk_group|first_k_dense_replace)$", 1, _ALL),
    (r"max_(source|target)_positions$", 32, _ALL),
    (r"(max_position_embeddings|n_positions)$", 512, _MOST),
    (r"(mamba_d_ssm|mamba_intermediate_size)$", 128, _MOST),
    (r"mamba_n(um)?_heads$", 8, _MOST),
    (rf".*{_HEAD_COUNTS}", 4, _MOST),
    (r".*(head_dim|d_kv|head_size|v_head_dim)$|mamba_d_head$", 16, ("tiny", "deep")),
    (r".*(head_dim|d_kv|head_size|v_head_dim)$|mamba_d_head$", 128, ("broad",)),
    (_WIDTHS, 64, ("tiny", "deep")),
    (_WIDTHS, 512, ("broad",)),
    (r".*(intermediate|ffn|feed_?forward|ffw|mlp_dim|mlp_hidden).*|.*(d_ff|n_inner)$", 128, _MOST),
    (r".*_rank$", 16, _MOST),
)


def _small_number(name: str, value: int, config: Any, sizes: str) -> int:
    """A small value of an integer field, by its name."""
    if re.search(r"token_(id|index)$", name) and value >= VOCAB:
        return VOCAB - 1 - (value % 16)
    if name == "image_size" and sizes != "shallow":
        patch = getattr(config, "patch_size", 16)
        return min(value, 4 * patch if isinstance(patch, int) and patch >= 14 else 64)
    largest = next(
        (most for rule, most, at in _LARGEST if sizes in at and _fits(rule, name)), value
    )
    if _fits(rf".*{_HEAD_COUNTS}", name) and sizes != "shallow":
        return min(value, _heads(name, value, config, largest))
    by_stage = any(re.search(_HEAD_COUNTS, k) for k, v in vars(config).items() if _is_list(v))
    if by_stage and _fits(_WIDTHS, name):
        return value  # each stage has its own multiple of it
    return min(value, largest)


def _fits(rule: str, name: str) -> bool:
    other = re.search(r"(layers?|blocks?)$", name) and re.search(_NO_DEPTH, name)
    return bool(re.match(rule, name)) and not other


def _heads(name: str, value: int, config: Any, largest: int) -> int:
    """Few heads; fewer key and value heads than others where that is so in the default."""
    if name == "num_heads" and hasattr(config, "expand"):
        return 8  # of a state space: heads * 16 = 2 * width
    most = max((v for k, v in vars(config).items() if _is_heads(k, v)), default=value)
    grouped = re.search(r"(kv|key_value)", name) and value < most
    return 2 if grouped else largest


def _is_heads(name: str, value: Any) -> bool:
    return isinstance(value, int) and bool(re.search(_HEAD_COUNTS, name))


def _is_list(value: Any) -> bool:
    return isinstance(value, list | tuple) and bool(value)


def _truncated_lists(config: Any, changes: dict[str, Any]) -> dict[str, Any]:
    """Lists of one entry a layer, cut to the layers that are left."""
    found: dict[str, Any] = {}
    layers = getattr(config, "num_hidden_layers", None)
    for name, value in vars(config).items():
        if isinstance(value, list) and layers and len(value) == layers:
            found[name] = value[: changes.get("num_hidden_layers", layers)]
        elif hasattr(value, "to_dict") and name in changes:
            found[name] = changes[name] | _truncated_lists(value, changes[name])
    return found


def _settle(config: Any) -> None:
    """No cache and no dice that steer the control flow."""
    for name, value in vars(config).items():
        if hasattr(value, "to_dict"):
            _settle(value)
        elif name.endswith("layerdrop") or name in ("mask_time_prob", "mask_feature_prob"):
            setattr(config, name, 0.0)
    for name in ("use_cache", "apply_spec_augment"):
        if hasattr(config, name):
            setattr(config, name, False)


def _fixed(model: nn.Module) -> dict[str, Any]:
    known = inspect.signature(model.forward).parameters
    wanted = {"use_cache": False, "return_dict": True, "return_loss": True}
    return {name: value for name, value in wanted.items() if name in known}


def guessed_inputs(model: nn.Module) -> Iterator[dict[str, Tensor]]:
    """Inputs by the arguments of `forward`, the likeliest first."""
    config, known = model.config, inspect.signature(model.forward).parameters
    torch.manual_seed(0)
    main = getattr(model, "main_input_name", "input_ids")
    options: dict[str, list[Tensor | None]] = {}
    for name in known:
        required = known[name].default is inspect.Parameter.empty
        found = _guesses(name, config, main, required)
        if found:
            options[name] = found
    if "labels" in known and (options or main != "labels"):
        options["labels"] = [*_labels(model, options), None]
    # All that it may take, then only what it must, then what is between.
    least = {
        name: [None] if _optional(values) and name != "labels" else values
        for name, values in options.items()
    }
    for tries, given in ((1, options), (2, least), (None, options)):
        for chosen in islice(product(*given.values()), tries):
            yield {n: t for n, t in zip(options, chosen, strict=True) if t is not None}


def _optional(values: list[Tensor | None]) -> bool:
    return any(value is None for value in values)


def _guesses(name: str, config: Any, main: str, required: bool) -> list[Tensor | None]:
    """Values for one argument; None for none."""
    multimodal = any(hasattr(config, n) for n in ("vision_config", "audio_config"))
    if name == "input_ids" and (main == name or multimodal or required):
        return [_ids(config)]
    if name == "decoder_input_ids" and (config.is_encoder_decoder or required):
        return [_ids(config)]
    if name in ("pixel_values", "pixel_values_videos", "videos") and (main == name or multimodal):
        return [*_images(config), *([] if main == name else [None])]
    if name == "input_values" and (main == name or multimodal):
        return [torch.randn(BATCH, 2000), *_spectra(config), torch.randn(BATCH, 1, 2000)]
    if name in ("input_features", "audio_values") and (main == name or multimodal):
        return [*_spectra(config), *([] if main == name else [None])]
    if name in ("past_values", "past_observed_mask", "past_time_features", "future_values"):
        return _series(name, config)
    if name == "inputs_embeds" and main == name:
        return [torch.randn(BATCH, LENGTH, _first(config, "hidden_size", 64))]
    if required and name not in ("self", "args", "kwargs"):
        return [torch.randn(BATCH, LENGTH, _first(config, "hidden_size", 64))]
    return []


def _ids(config: Any) -> Tensor:
    vocab = min(_first(config, "vocab_size", VOCAB), VOCAB)
    return torch.randint(min(5, vocab - 2), max(vocab - 20, 6), (BATCH, LENGTH)).clamp(
        max=vocab - 1
    )


def _images(config: Any) -> list[Tensor | None]:
    size = _first(config, "image_size", 64)
    height, width = size if isinstance(size, list | tuple) else (size, size)
    channels = next(
        (c for n in ("num_channels", "in_channels", "in_chans") if (c := _first(config, n, 0))), 3
    )
    images = torch.randn(BATCH, channels, height, width)
    frames = _first(config, "num_frames", 0)
    videos = [torch.randn(BATCH, frames, channels, height, width)] if frames else []
    small = [torch.randn(BATCH, channels, 64, 64)] if height != 64 else []
    return [*videos, images, *small, images[:, None]]


def _spectra(config: Any) -> list[Tensor | None]:
    bins = _first_of(config, _BIN_FIELDS, 80)
    frames = 2 * _first(config, "max_source_positions", 32)
    longest = _first(config, "max_length", 64)
    shapes = [(bins, frames), (64, bins), (longest, bins), (1, longest, bins), (bins, 64)]
    return [torch.randn(BATCH, *shape) for shape in shapes]


def _series(name: str, config: Any) -> list[Tensor | None]:
    lags = max(getattr(config, "lags_sequence", None) or [0])
    length = _first(config, "context_length", 32) + lags
    channels = _first(config, "num_input_channels", 0) or _first(config, "input_size", 1)
    wide = (channels,) if channels > 1 or _first(config, "num_input_channels", 0) else ()
    match name:
        case "past_observed_mask":
            return [torch.ones(BATCH, length, *wide), None]
        case "past_time_features":
            count = max(_first(config, "num_time_features", 0), 1)
            return [torch.randn(BATCH, length, count)]
        case "future_values":
            return [torch.randn(BATCH, _first(config, "prediction_length", 8), *wide), None]
        case _:
            return [torch.randn(BATCH, length, *wide)]


def _labels(model: nn.Module, options: dict[str, list[Tensor | None]]) -> list[Tensor]:
    name = type(model).__name__
    if name.endswith("ForCTC"):
        return [torch.randint(1, 20, (BATCH, 4))]
    if any(name.endswith(head) for head in _TOKEN_LABELS):
        for source in ("decoder_input_ids", "input_ids"):
            tokens = options.get(source, [None])[0]
            if tokens is not None:
                return [tokens.clone()]
    if "Classification" in name:
        return [torch.randint(0, 2, (BATCH,))]
    if "Segmentation" in name:
        size = _first(model.config, "image_size", 64)
        return [torch.randint(0, 2, (BATCH, size, size))] if isinstance(size, int) else []
    return []


def _tokens_wanted(message: str, config: Any) -> list[int]:
    """Image tokens of the batch that a vision-language model may ask for in its error."""
    found = re.findall(r"features\D*(\d+)", message) if "tokens" in message else []
    if not found:
        return []
    count, width = int(found[-1]), _first(config.get_text_config(), "hidden_size", 64)
    return [n for n in (count, count // width) if n and n % BATCH == 0 and n <= 1024]


def _with_tokens(model: nn.Module, inputs: dict[str, Tensor], tokens: int) -> dict[str, Tensor]:
    """The same inputs with so many image tokens in the whole batch."""
    config = model.config
    token = _first_of(config, _PLACEHOLDER_FIELDS, None)
    if token is None or "input_ids" not in inputs:
        return inputs
    ids = torch.cat([torch.full((BATCH, tokens // BATCH), token), inputs["input_ids"]], dim=1)
    more = inputs | {"input_ids": ids}
    return more | ({"labels": ids.clone()} if "labels" in inputs else {})


def _first_of(config: Any, names: tuple[str, ...], default: Any) -> Any:
    """The first of several fields that a config has."""
    return next((found for name in names if (found := _first(config, name, 0))), default)


def _first(config: Any, name: str, default: Any) -> Any:
    """A field of a config, or of the first of its parts that has it."""
    value = getattr(config, name, None)
    if value is not None:
        return value
    for part in vars(config).values():
        if hasattr(part, "to_dict") and (found := _first(part, name, None)) is not None:
            return found
    return default


def _tensors(found: Any) -> list[Tensor]:
    if isinstance(found, Tensor):
        return [found]
    if isinstance(found, dict):
        return [tensor for value in found.values() for tensor in _tensors(value)]
    if isinstance(found, list | tuple):
        return [tensor for value in found for tensor in _tensors(value)]
    return []
