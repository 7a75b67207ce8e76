"""Whether a shape of the library is legal; what is not is refused with the nearest legal value."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from rlplace.errors import InputError, nearest_names
from rlplace.graph.models.shapes import (
    Clip,
    Dlrm,
    Llama,
    Llava,
    Lstm,
    Mixtral,
    ResNet,
    Shape,
    Swin,
    Unet,
    Vit,
    Whisper,
)

#: (argument, argument that must divide it); where a family lacks one of them, it does not apply.
_DIVIDES = (
    ("hidden", "heads"),
    ("heads", "kv_heads"),
    ("image", "patch"),
    ("text_hidden", "text_heads"),
    ("vision_hidden", "vision_heads"),
)


def check_names(family: str, default: Shape, arguments: dict[str, Any]) -> None:
    """Every argument is a field of the family, and has the type of its default.

    Raises:
        InputError: If not.
    """
    legal = {field.name: getattr(default, field.name) for field in fields(default)}
    for name, value in arguments.items():
        if name not in legal:
            rule = f"{family} has no such argument; it takes {', '.join(legal)}"
            raise InputError(name, value, rule, nearest_names(name, legal))
        _check_type(name, value, legal[name])


def check_shape(shape: Shape) -> None:
    """The fields fit together.

    Raises:
        InputError: If not.
    """
    _check_parts(shape)
    match shape:
        case Llama() | Llava():
            _check_rotary(shape)
        case Mixtral():
            _check_rotary(shape)
            if shape.top_k > shape.experts:
                rule = f"at most all {shape.experts} experts"
                raise InputError("top_k", shape.top_k, rule, shape.experts)
        case Whisper() if shape.hidden % 2:
            rule = "must be even: positions are pairs of sine and cosine"
            raise InputError("hidden", shape.hidden, rule, shape.hidden + 1)
        case Lstm():
            _check_lstm(shape)
        case Swin():
            _check_swin(shape)
        case Unet():
            _check_unet(shape)
        case ResNet():
            _lists(shape, "widths", "depths")
        case Dlrm():
            _sizes("bottom", shape)
            _sizes("top", shape)


def _check_parts(shape: Shape) -> None:
    """Heads divide widths, and patches images."""
    if isinstance(shape, Vit | Swin | Clip | Llava) and shape.patch > shape.image:
        raise InputError("patch", shape.patch, f"not larger than image={shape.image}", shape.image)
    for whole, part in _DIVIDES:
        if not isinstance(getattr(shape, whole, None), int) or not hasattr(shape, part):
            continue
        size, divisor = getattr(shape, whole), getattr(shape, part)
        if size % divisor and not hasattr(shape, "head_dim"):
            nearest = min(_divisors(size), key=lambda d: abs(d - divisor))
            raise InputError(part, divisor, f"{part} must divide {whole}={size}", nearest)


def _check_rotary(shape: Llama | Mixtral | Llava) -> None:
    """Rotary positions turn pairs of features."""
    if (shape.hidden // shape.heads) % 2:
        legal = [d for d in _divisors(shape.hidden) if (shape.hidden // d) % 2 == 0]
        legal = [d for d in legal if d % shape.kv_heads == 0] or legal or [1]
        nearest = min(legal, key=lambda d: abs(d - shape.heads))
        rule = f"hidden={shape.hidden} over heads must be even for rotary positions"
        raise InputError("heads", shape.heads, rule, nearest)


def _check_lstm(shape: Lstm) -> None:
    if shape.seq_len < 2:
        raise InputError("seq_len", shape.seq_len, "must hold a token and the next one", 2)
    if shape.tie_embeddings and shape.width != shape.hidden:
        rule = f"must be hidden={shape.hidden} where the head is the embedding"
        raise InputError("width", shape.width, rule, shape.hidden)


def _check_swin(shape: Swin) -> None:
    depths, heads = _lists(shape, "depths", "heads")
    for level, count in enumerate(heads):
        _check_list(shape, "heads", level, count, shape.width * 2**level)
    side = shape.image // shape.patch
    for _ in depths[1:]:
        side = (side + 1) // 2
    if shape.window > side:
        rule = f"not larger than the side of the last stage, {side} patches"
        raise InputError("window", shape.window, rule, side)


def _check_unet(shape: Unet) -> None:
    widths, depths, heads = _lists(shape, "widths", "transformers", "heads")
    for level, width in enumerate(widths):
        if width % shape.norm_groups:
            nearest = max(1, round(width / shape.norm_groups)) * shape.norm_groups
            rule = f"must be multiples of norm_groups={shape.norm_groups}; level {level} could be"
            raise InputError("widths", shape.widths, rule, nearest)
        if depths[level] or level == len(widths) - 1:  # the last level's are the middle's too
            _check_list(shape, "heads", level, heads[level], width)
    if widths[0] % 2:
        rule = "the first must be even: time is embedded as pairs of sine and cosine"
        raise InputError("widths", shape.widths, rule, widths[0] + 1)
    step = 2 ** (len(widths) - 1)
    if shape.image % step:
        nearest = max(1, round(shape.image / step)) * step
        rule = f"must be a multiple of {step}: each level halves it"
        raise InputError("image", shape.image, rule, nearest)


def _check_list(shape: Shape, name: str, level: int, part: int, whole: int) -> None:
    """One number of a list must divide the width of its level."""
    if whole % part:
        nearest = min(_divisors(whole), key=lambda d: abs(d - part))
        rule = f"number {level + 1} of the list must divide the width {whole}"
        raise InputError(name, getattr(shape, name), rule, nearest)


def _check_type(name: str, value: Any, default: Any) -> None:
    if isinstance(default, bool):
        if not isinstance(value, bool):
            raise InputError(name, value, "must be true or false", default)
    elif isinstance(default, int):
        if not isinstance(value, int) or isinstance(value, bool):
            raise InputError(name, value, "must be an integer", default)
        if value < 1:
            raise InputError(name, value, "must be at least 1", 1)
    elif isinstance(default, float):
        if not isinstance(value, int | float) or not 0.0 <= value < 1.0:
            raise InputError(name, value, "must be in [0, 1)", default)
    elif not isinstance(value, str):
        raise InputError(name, value, "must be numbers with commas between", repr(default))


def _lists(shape: Shape, first: str, *others: str) -> list[list[int]]:
    """Lists with a number for each level, all of the length of the first."""
    lists = [_sizes(name, shape) for name in (first, *others)]
    for name, numbers in zip(others, lists[1:], strict=True):
        if len(numbers) != len(lists[0]):
            rule = f"needs as many numbers as {first}={getattr(shape, first)!r}"
            raise InputError(name, getattr(shape, name), rule, ",".join(["1"] * len(lists[0])))
    return lists


def _sizes(name: str, shape: Shape) -> list[int]:
    text, least = getattr(shape, name), 0 if name == "transformers" else 1
    parts = text.split(",")
    if not all(part.strip().isdigit() and int(part) >= least for part in parts):
        default = repr(getattr(type(shape)(), name))
        sign = "positive" if least else "not negative"
        rule = f"must be {sign} numbers with commas between"
        raise InputError(name, text, rule, default)
    return [int(part) for part in parts]


def _divisors(size: int) -> list[int]:
    return [d for d in range(1, size + 1) if size % d == 0]
