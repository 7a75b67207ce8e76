"""What a capture of a user's module depends on, as plain data for the cache.

Two captures with equal keys give equal graphs: the source files of the user's classes and functions
(and of all of the user's files that they name), the versions of the packages that other classes
come from, every plain attribute of every submodule, names, shapes and dtypes of parameters and
buffers, the inputs and the options. What has no source file (a class typed at a prompt) has no key.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import sysconfig
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

_INSTALLED = tuple(
    sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")
)
_OURS = str(Path(__file__).parents[1])
_OF_MODULES = frozenset(vars(nn.Module()))
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
#: Attributes of attributes are followed this far.
_DEPTH = 8


def model_key(
    module: nn.Module,
    call: tuple[tuple[Any, ...], Mapping[str, Any]],
    options: Mapping[str, Any],
    factory: Callable[..., Any] | None = None,
) -> dict[str, Any] | None:
    """The key, or None where some source cannot be found.

    Args:
        module: What is captured.
        call: Positional and keyword inputs.
        options: The other arguments of `rlplace.graph.capture.capture`.
        factory: The function that made the module, if one did.
    """
    parts = list(module.modules())
    for option in options.values():
        parts += option.modules() if isinstance(option, nn.Module) else ()
    roots = [*dict.fromkeys(kind for part in parts for kind in type(part).__mro__), factory]
    roots += [vars(part)["forward"] for part in parts if "forward" in vars(part)]
    roots += [option for option in options.values() if callable(option)]
    sources = _sources(roots)
    if sources is None:
        return None
    plain = _Plain()
    return {
        "sources": sources,
        "packages": _packages(parts),
        "modules": [(name, plain.module(part)) for name, part in module.named_modules()],
        "states": [
            (name, plain.value(tensor))
            for named in (module.named_parameters, module.named_buffers)
            for name, tensor in named(remove_duplicate=False)
        ],
        "ties": _ties(module),
        "call": plain.value(call),
        "options": plain.value(dict(options)),
    }


def _sources(roots: Sequence[Any]) -> list[Any] | None:
    """Hashes of the user's files that hold the roots and what these name, and plain globals."""
    files: dict[str, str] = {}
    values: list[tuple[str, str]] = []
    seen: set[int] = set()
    waiting = [function for root in roots for function in _functions(root)]
    if any(_file(function) is None for function in waiting):
        return None
    while waiting:
        function = waiting.pop()
        file = _file(function)
        if file is None or id(function.__globals__) in seen or not _is_users(file):
            continue
        seen.add(id(function.__globals__))
        files[file] = hashlib.sha256(Path(file).read_bytes()).hexdigest()
        for name, value in function.__globals__.items():
            if isinstance(value, bool | int | float | str) and not name.startswith("__"):
                values.append((name, repr(value)))
            waiting += _functions(value)
    return [sorted(files.values()), sorted(values)]


def _file(function: types.FunctionType) -> str | None:
    """Where a function is written; for a generated one (of a dataclass) its module's file."""
    for file in (function.__code__.co_filename, function.__globals__.get("__file__")):
        if file and (Path(file).is_file() or file.startswith("<frozen")):
            return str(file)
    return None


def _functions(value: Any) -> Iterator[types.FunctionType]:
    """The functions that a class, module, partial or method is made of."""
    if isinstance(value, types.FunctionType):
        yield value
        if hasattr(value, "__wrapped__"):
            yield from _functions(value.__wrapped__)
    elif isinstance(value, types.MethodType | staticmethod | classmethod):
        yield from _functions(value.__func__)
    elif isinstance(value, functools.partial):
        yield from _functions(value.func)
    elif isinstance(value, property):
        yield from _functions(value.fget)
    elif isinstance(value, type | types.ModuleType):
        file = getattr(value, "__file__", None)
        if isinstance(value, type) or (file and _is_users(file)):
            for item in vars(value).values():
                if not isinstance(item, type | types.ModuleType):
                    yield from _functions(item)


def _is_users(file: str) -> bool:
    return not file.startswith((*_INSTALLED, _OURS, "<"))


def _packages(parts: Sequence[nn.Module]) -> dict[str, str]:
    names = {kind.__module__.split(".")[0] for part in parts for kind in type(part).__mro__}
    return {name: _version(name) for name in sorted(names)}


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _ties(module: nn.Module) -> list[list[str]]:
    names: dict[int, list[str]] = {}
    for name, param in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(param), []).append(name)
    return [tied for tied in names.values() if len(tied) > 1]


class _Plain:
    """Turns values into lists of strings; an object that comes again is a number."""

    def __init__(self) -> None:
        self._seen: dict[int, int] = {}
        self._alive: list[Any] = []

    def module(self, part: nn.Module) -> Any:
        """Class and attributes of a module; its children have entries of their own."""
        own = {k: v for k, v in vars(part).items() if k not in _OF_MODULES and k != "forward"}
        hooks = [list(vars(part).get(name, {}).values()) for name in _HOOKS]
        return [_title(type(part)), part.training, self.value(own), self.value(hooks)]

    def value(self, value: Any, depth: int = _DEPTH) -> Any:
        """A value as plain data."""
        if value is None or isinstance(value, bool | int | float | complex | str | bytes):
            return repr(value)
        if isinstance(value, torch.dtype | torch.device | torch.layout):
            return str(value)
        if isinstance(value, Tensor):
            return ["tensor", str(value.dtype), list(map(str, value.shape)), value.requires_grad]
        if id(value) in self._seen:
            return self._seen[id(value)]
        if not isinstance(value, list | tuple | dict | set | frozenset):
            self._seen[id(value)] = len(self._seen)
            self._alive.append(value)
        if depth == 0:
            return _title(type(value))
        if isinstance(value, Mapping):
            items = [(repr(k), self.value(v, depth - 1)) for k, v in value.items()]
            return [_title(type(value)), items]
        if isinstance(value, list | tuple):
            return [_title(type(value)), [self.value(item, depth - 1) for item in value]]
        if isinstance(value, set | frozenset):
            return sorted(map(repr, value))
        return self._object(value, depth)

    def _object(self, value: Any, depth: int) -> Any:
        if isinstance(value, types.FunctionType):
            cells = [cell.cell_contents for cell in value.__closure__ or ()]
            inner = [value.__defaults__, value.__kwdefaults__, cells]
            return [_title(value), self.value(inner, depth - 1)]
        if isinstance(value, type | types.BuiltinFunctionType):
            return _title(value)
        if isinstance(value, functools.partial):
            return ["partial", self.value([value.func, value.args, value.keywords], depth - 1)]
        if isinstance(value, nn.Module):
            return self.module(value)
        return [_title(type(value)), self.value(getattr(value, "__dict__", {}), depth - 1)]


def _title(value: Any) -> str:
    return f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', value)}"
