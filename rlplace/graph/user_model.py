"""A user's own model, named as ``file.py:function`` or ``package.module:function``."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from rlplace.errors import InputError, nearest_names
from rlplace.graph.types import OpGraph

if TYPE_CHECKING:
    from torch import nn

Factory = Callable[[], "tuple[nn.Module, dict[str, Any]]"]


def is_user_model(name: str) -> bool:
    """Whether a model is named as a function, not as a model of the library."""
    return ":" in name


def load_factory(name: str) -> Factory:
    """The function that a name points to.

    Raises:
        InputError: If the file, the module or the function does not exist.
    """
    place, _, function = name.partition(":")
    module = _load_file(Path(place)) if place.endswith(".py") else _import(place)
    found = getattr(module, function, None)
    if not callable(found):
        known = [n for n, value in vars(module).items() if callable(value)]
        rule = f"{place} has no function {function!r}"
        raise InputError("model", name, rule, nearest_names(function, known))
    factory: Factory = found
    return factory


def capture_user_model(name: str, **options: Any) -> OpGraph:
    """Call the function and capture what it returns: (module, keyword inputs of a batch of 2+).

    Args:
        name: As in `load_factory`.
        options: Of `rlplace.graph.capture.capture`.

    Raises:
        InputError: If it returns something else.
        CaptureError: If `torch.export` refuses the module.
    """
    from rlplace.graph.capture import capture

    made = load_factory(name)()
    if not (isinstance(made, tuple) and len(made) == 2 and isinstance(made[1], dict)):
        rule = "the function returns (module, dict of keyword example tensors)"
        raise InputError("model", name, rule)
    module, inputs = made
    return capture(module, kwargs=inputs, name=name, **options)


def _load_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise InputError("model", str(path), "no such file")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(path.stem, module)
    spec.loader.exec_module(module)
    return module


def _import(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise InputError("model", name, f"cannot be imported ({error})") from error
