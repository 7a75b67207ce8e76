"""A user's own model, named as ``file.py:function`` or ``package.module:function``."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import TYPE_CHECKING, Any

from rlplace.errors import InputError, nearest_names
from rlplace.graph.cache import cache_path, load_graph, store_graph
from rlplace.graph.types import OpGraph

if TYPE_CHECKING:
    from torch import nn

Factory = Callable[..., Any]


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


def capture_user_model(name: str, *, seq_len: int | None = None, **options: Any) -> OpGraph:
    """Call the function and capture what it returns; the cache answers a second time.

    The function returns ``(module, inputs)`` or ``(module, inputs, options)``: inputs are a dict of
    keywords or a tuple of positional ones, of a batch of 2 or more, and options those of
    `rlplace.graph.capture.capture` that the model needs (``loss``, ``targets``, ``batch_dim``).

    Args:
        name: As in `load_factory`.
        seq_len: Given to the function, which must have an argument of that name.
        options: Of `rlplace.graph.capture.capture`.

    Raises:
        InputError: If it returns something else, or takes no ``seq_len``.
        CaptureError: If `torch.export` refuses the module.
    """
    factory = load_factory(name)
    made = factory(**_arguments(name, factory, seq_len))
    sized = isinstance(made, tuple) and len(made) in (2, 3)
    if not sized or not isinstance(made[1], dict | tuple) or not isinstance(made[-1], dict | tuple):
        rule = (
            "the function returns (module, inputs) or (module, inputs, options); inputs are a dict "
            "of keyword example tensors, or a tuple of positional ones"
        )
        raise InputError("model", name, rule)
    module, inputs = made[:2]
    args, kwargs = (inputs, {}) if isinstance(inputs, tuple) else ((), inputs)
    chosen = {"name": name, **(made[2] if len(made) == 3 else {}), **options}
    return capture_cached(module, args, kwargs, factory=factory, **chosen)


def capture_cached(
    module: nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    factory: Callable[..., Any] | None = None,
    **options: Any,
) -> OpGraph:
    """As `rlplace.graph.capture.capture`, with the graph kept on disk.

    It is found again while nothing changes that the capture depends on, see
    `rlplace.graph.model_key`. What has no source file is captured every time.

    Args:
        module: As for a capture, like all that is not named here.
        args: Positional inputs.
        kwargs: Keyword inputs.
        factory: The function that made the module.
        options: The rest.
    """
    from rlplace.graph.capture import capture
    from rlplace.graph.model_key import model_key

    key = model_key(module, (args, dict(kwargs or {})), options, factory)
    path = cache_path({"module": key}) if key is not None else None
    if path is not None and (found := load_graph(path)) is not None:
        return found
    graph = capture(module, args, kwargs, **options)
    if path is not None:
        store_graph(path, graph)
    return graph


def _arguments(name: str, factory: Callable[..., Any], seq_len: int | None) -> dict[str, Any]:
    if seq_len is None:
        return {}
    if "seq_len" not in inspect.signature(factory).parameters:
        raise InputError("seq_len", seq_len, f"{name} has no argument seq_len")
    return {"seq_len": seq_len}


class _FromSource(SourceFileLoader):
    """Compiles a file as it is: bytecode is kept by size and second, which an edit may leave."""

    def get_code(self, fullname: str) -> CodeType:
        """The code of the file."""
        return self.source_to_code(self.get_data(self.path), self.path)


def _load_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise InputError("model", str(path), "no such file")
    loader = _FromSource(path.stem, str(path))
    spec = importlib.util.spec_from_file_location(path.stem, path, loader=loader)
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
