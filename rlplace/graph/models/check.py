"""Whether a shape of the library is legal; what is not is refused with the nearest legal value."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from rlplace.errors import InputError, nearest_names
from rlplace.graph.models.shapes import Dlrm, Mixtral, ResNet, Shape, Vit

#: (argument, argument that must divide it); where a family lacks one of them, it does not apply.
_DIVIDES = (("hidden", "heads"), ("heads", "kv_heads"), ("image", "patch"))


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
    for whole, part in _DIVIDES:
        if not isinstance(getattr(shape, whole, None), int) or not hasattr(shape, part):
            continue
        size, divisor = getattr(shape, whole), getattr(shape, part)
        if size % divisor and not hasattr(shape, "head_dim"):
            nearest = min(_divisors(size), key=lambda d: abs(d - divisor))
            raise InputError(part, divisor, f"{part} must divide {whole}={size}", nearest)
    match shape:
        case Mixtral(experts=experts, top_k=top_k) if top_k > experts:
            raise InputError("top_k", top_k, f"at most all {experts} experts", experts)
        case Vit(image=image, patch=patch) if patch > image:
            raise InputError("patch", patch, f"not larger than the image of {image}", image)
        case ResNet():
            depths, widths = (_sizes(name, shape) for name in ("depths", "widths"))
            if len(depths) != len(widths):
                rule = f"needs as many numbers as widths={shape.widths!r}"
                raise InputError("depths", shape.depths, rule)
        case Dlrm():
            _sizes("bottom", shape)
            _sizes("top", shape)


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


def _sizes(name: str, shape: Shape) -> list[int]:
    text = getattr(shape, name)
    parts = text.split(",")
    if not all(part.strip().isdigit() and int(part) > 0 for part in parts):
        default = repr(getattr(type(shape)(), name))
        raise InputError(name, text, "must be positive numbers with commas between", default)
    return [int(part) for part in parts]


def _divisors(size: int) -> list[int]:
    return [d for d in range(1, size + 1) if size % d == 0]
