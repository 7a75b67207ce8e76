"""Equal layers are traced once: the nodes of the first one are copied for the others.

While `torch.export` traces a model, each call of an element of a repeated module (``layers.7``)
goes through here. The first call of its kind is traced as usual and kept. A later one gets copies
of those nodes, on its own parameters and arguments, if nothing that its forward could depend on
differs: the classes of its modules, shapes of parameters and buffers, arguments, hooks, grad mode,
and every plain attribute. Where an attribute differs between siblings (``layer_idx``), it is
watched while the first one is traced: a layer that reads it is traced every time, and so is one
that sets an attribute, is given an object, or does anything else than call functions.

The graph is the one that plain tracing gives, but for the numbers in the names of sizes. A kind of
call that cannot be copied is found out once, not for every layer.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.experimental import proxy_tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

_Tracer = proxy_tensor._ModuleStackTracer
#: (path of a submodule relative to the layer, name of one of its attributes).
_Attribute = tuple[str, str]
_PLAIN = (int, float, str, bool, type(None), torch.dtype, torch.device)


@contextlib.contextmanager
def trace_repeats_once() -> Iterator[None]:
    """What is exported in this context is traced with the equal layers copied."""
    plain = _Tracer.call_module
    repeats = _Repeats(plain)

    def call_module(tracer: Any, m: nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
        return repeats.call(tracer, m, forward, args, kwargs)

    _Tracer.call_module = call_module  # type: ignore[method-assign, assignment]  # torch has no hook
    try:
        yield
    finally:
        _Tracer.call_module = plain  # type: ignore[method-assign]  # put back


@dataclass(frozen=True)
class _Call:
    """The arguments of a call: how they are nested, and what matters of each leaf."""

    leaves: tuple[Any, ...]
    looks: tuple[Any, ...]
    spec: Any
    versions: tuple[int, ...]

    @staticmethod
    def of(args: Any, kwargs: Any) -> _Call | None:
        """None where an argument is neither a tensor nor plain: it might carry state."""
        leaves, spec = pytree.tree_flatten((args, kwargs))
        looks = tuple(map(_looks, leaves))
        if any(look is None for look in looks):
            return None
        return _Call(tuple(leaves), looks, spec, _versions(leaves))

    def untouched(self) -> bool:
        """Whether nothing has written into an argument since."""
        return self.versions == _versions(self.leaves)

    def like(self, other: _Call) -> bool:
        """Whether a forward cannot tell the two apart, but by the values of tensors."""
        return self.looks == other.looks and self.spec == other.spec


@dataclass(frozen=True)
class _Kind:
    """What decides which nodes a call of a layer is traced to, attributes apart.

    Args:
        anatomy: Its modules and states.
        call: Its arguments.
        state: Grad mode and autocast.
    """

    anatomy: list[Any]
    call: _Call
    state: tuple[Any, ...]

    def like(self, other: _Kind) -> bool:
        """Whether the two give the same nodes if no attribute that differs is read."""
        same = self.state == other.state and self.anatomy == other.anatomy
        return same and self.call.like(other.call)


@dataclass(frozen=True)
class _Recording:
    """A traced layer.

    Args:
        path: Fully qualified name of the layer.
        kind: What decides which nodes it has.
        nodes: What was traced.
        outer: Nodes of its arguments and states, before.
        after: The same, after it: other nodes where it wrote into a buffer, or where an op gave
            its argument back.
        outputs: Leaves of what it returned; `spec` nests them.
    """

    path: str
    kind: _Kind
    nodes: tuple[fx.Node, ...]
    outer: tuple[fx.Node | None, ...]
    after: tuple[fx.Node | None, ...]
    outputs: tuple[Any, ...]
    spec: Any


@dataclass(frozen=True)
class _Output:
    """A tensor that a layer returned, as it was then: its caller may write into it."""

    node: fx.Node
    size: tuple[Any, ...]
    stride: tuple[Any, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool
    fake_mode: Any

    @staticmethod
    def of(node: fx.Node, tensor: Tensor) -> _Output:
        with torch._C.DisableTorchFunction():
            return _Output(
                node,
                tuple(tensor.shape),
                tensor.stride(),
                tensor.dtype,
                tensor.device,
                tensor.requires_grad,
                getattr(tensor, "fake_mode", None),
            )

    def again(self) -> Tensor:
        """Another tensor like it: its own storage, and no leaf where it needs a gradient."""
        options: Any = {"dtype": self.dtype, "device": self.device}
        with torch._C.DisableTorchFunction(), _disable_current_modes(), self.fake_mode:
            made = torch.empty_strided(self.size, self.stride, **options)
            if self.requires_grad:
                made.copy_(torch.zeros((), requires_grad=True, **options))
        return made


@dataclass
class _Repeats:
    """What one export has recorded so far, by the path of the repeated module."""

    plain: Callable[..., Any]
    recordings: dict[str, list[_Recording]] = field(default_factory=dict)
    traced: dict[str, list[_Kind]] = field(default_factory=dict)

    def call(self, tracer: Any, m: nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
        """Copy what is there, else trace, and keep it if it can be copied."""
        path = None if tracer.enable_attr_proxy else tracer.submodule_paths.get(m)
        parent, _, last = (path or "").rpartition(".")
        call = _Call.of(args, kwargs) if last.isdigit() else None
        if path is None or call is None or tracer.num_calls.get(path, 0):
            return self.plain(tracer, m, forward, args, kwargs)
        kind = _Kind(_anatomy(m), call, _state())
        known, traced = self.recordings.setdefault(parent, []), self.traced.setdefault(parent, [])
        for recording in known:
            if kind.like(recording.kind):
                tracer.num_calls[path] = 1
                return _replay(recording, tracer, m, path, call)
        if any(map(kind.like, traced)):
            return self.plain(tracer, m, forward, args, kwargs)
        traced.append(kind)  # whatever comes of it, once is enough
        siblings = [s for s in tracer.scope_root.get_submodule(parent).children() if s is not m]
        alike = [s for s in siblings if _anatomy(s) == kind.anatomy]
        if not alike:
            return self.plain(tracer, m, forward, args, kwargs)
        before, last_node = _attributes(m), tracer.graph._root._prev
        unlike = set().union(*(_unlike(before, _attributes(s)) for s in alike))
        outer = _outer(tracer, m, call)
        with _watch(m, unlike) as seen:
            result = self.plain(tracer, m, forward, args, kwargs)
        made = _nodes_after(tracer.graph, last_node)
        leaves, spec = pytree.tree_flatten(result)
        after = _outer(tracer, m, call)
        untouched = not seen and not _unlike(before, _attributes(m)) and call.untouched()
        if untouched and _copies(made) and all(_returnable(tracer, leaf) for leaf in leaves):
            outputs = tuple(_described(tracer, leaf) for leaf in leaves)
            known.append(_Recording(path, kind, made, outer, after, outputs, spec))
        return result


def _replay(recording: _Recording, tracer: Any, m: nn.Module, path: str, call: _Call) -> Any:
    """Copy the nodes of a recording onto a layer's own arguments and states."""
    own = _outer(tracer, m, call)
    copies: dict[fx.Node, fx.Node] = {
        old: new for old, new in zip(recording.outer, own, strict=True) if old and new
    }

    def moved(node: fx.Node) -> fx.Node:
        return copies.get(node, node)

    for node in recording.nodes:
        if isinstance(node.meta.get("val"), torch.SymInt):
            continue  # a size is the same in every layer
        copy = tracer.graph.create_node(
            node.op,
            node.target,
            fx.node.map_arg(node.args, moved),
            fx.node.map_arg(node.kwargs, moved),
            _base_name(tracer.graph, node),
        )
        copy.meta = dict(node.meta)
        copy.meta["nn_module_stack"] = _moved_stack(node, recording.path, path)
        copies[node] = copy
    given = (*call.leaves, *(tensor for _, tensor in _states(m)))
    for tensor, old, new in zip(given, recording.outer, recording.after, strict=True):
        if new is not None and new is not old:
            _track(tracer, tensor, moved(new))
    outputs = [_returned(tracer, leaf, copies) for leaf in recording.outputs]
    return pytree.tree_unflatten(outputs, recording.spec)


def _returned(tracer: Any, leaf: Any, copies: Mapping[fx.Node, fx.Node]) -> Any:
    """A tensor like the recorded one, known to the tracer as the value of the copied node."""
    if not isinstance(leaf, _Output):
        return leaf
    made = leaf.again()
    _track(tracer, made, copies[leaf.node])
    return made


def _track(tracer: Any, tensor: Tensor, node: fx.Node) -> None:
    with torch._C.DisableTorchFunction(), _disable_current_modes():
        proxy = fx.Proxy(node, tracer)
        proxy_tensor.track_tensor(tensor, proxy, constant=None, tracer=tracer)


def _described(tracer: Any, leaf: Any) -> Any:
    node = _node(tracer, leaf)
    return leaf if node is None else _Output.of(node, leaf)


def _outer(tracer: Any, m: nn.Module, call: _Call) -> tuple[fx.Node | None, ...]:
    """Nodes of the arguments, then of the states; None for what is no traced tensor."""
    states = [tensor for _, tensor in _states(m)]
    return tuple(_node(tracer, leaf) for leaf in (*call.leaves, *states))


def _node(tracer: Any, leaf: Any) -> fx.Node | None:
    if not isinstance(leaf, Tensor) or leaf not in tracer.tensor_tracker:
        return None
    node: fx.Node = tracer.tensor_tracker[leaf].proxy.node
    return node


def _returnable(tracer: Any, leaf: Any) -> bool:
    """Whether a result is plain, or a tensor made here that is not expanded."""
    if not isinstance(leaf, Tensor):
        return isinstance(leaf, _PLAIN)
    with torch._C.DisableTorchFunction():
        dense = all(not isinstance(step, int) or step > 0 for step in leaf.stride())
    node = _node(tracer, leaf)
    return dense and node is not None and node.op == "call_function"


def _nodes_after(graph: fx.Graph, node: fx.Node) -> tuple[fx.Node, ...]:
    found = []
    while (node := node._next) is not graph._root:
        found.append(node)
    return tuple(found)


def _copies(nodes: tuple[fx.Node, ...]) -> bool:
    """Whether nodes can be copied: calls of functions, on tensors without known values."""
    return all(node.op == "call_function" for node in nodes)


def _base_name(graph: fx.Graph, node: fx.Node) -> str | None:
    """The name that the tracer asks for before it is made unique."""
    packet = getattr(node.target, "overloadpacket", None)
    return graph._target_to_str(packet.__name__) if packet is not None else None


def _moved_stack(node: fx.Node, old: str, new: str) -> dict[str, tuple[str, str]]:
    """The modules that a node comes from, with one layer's path in the place of another's."""

    def moved(path: str) -> str:
        inside = path == old or path.startswith((f"{old}.", f"{old}@"))
        return new + path.removeprefix(old) if inside else path

    stack = node.meta.get("nn_module_stack") or {}
    return {moved(key): (moved(path), kind) for key, (path, kind) in stack.items()}


def _versions(leaves: Sequence[Any]) -> tuple[int, ...]:
    with torch._C.DisableTorchFunction():
        return tuple(leaf._version for leaf in leaves if isinstance(leaf, Tensor))


def _state() -> tuple[Any, ...]:
    return torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), torch.is_autocast_enabled()


def _looks(leaf: Any) -> Any:
    """What a forward can see of an argument or state; None where that cannot be told."""
    if isinstance(leaf, Tensor):
        with torch._C.DisableTorchFunction():  # the tracer need not know that we look
            size = tuple(map(str, (*leaf.shape, *leaf.stride(), leaf.storage_offset())))
            return size, leaf.dtype, leaf.device, leaf.requires_grad, type(leaf)
    if isinstance(leaf, torch.SymInt):
        return "SymInt", str(leaf)
    return ("plain", type(leaf), leaf) if isinstance(leaf, _PLAIN) else None


def _states(m: nn.Module) -> list[tuple[str, Tensor]]:
    named = (m.named_parameters, m.named_buffers)
    return [pair for iterate in named for pair in iterate(remove_duplicate=False)]


def _anatomy(m: nn.Module) -> list[Any]:
    """Modules and states, by relative name; a hook is like nothing else."""
    modules = [
        (name, type(part), part.training, object() if _has_hooks(part) else None)
        for name, part in m.named_modules(remove_duplicate=False)
    ]
    return [modules, [(name, _looks(tensor)) for name, tensor in _states(m)]]


def _has_hooks(m: nn.Module) -> bool:
    return bool(m._forward_hooks or m._forward_pre_hooks)


def _attributes(m: nn.Module) -> dict[_Attribute, Any]:
    """All that was set on the modules of a layer, but submodules, parameters and buffers."""
    return {
        (name, attribute): value
        for name, part in m.named_modules(remove_duplicate=False)
        for attribute, value in vars(part).items()
        if attribute not in _OF_MODULES
    }


_OF_MODULES = frozenset(vars(nn.Module()))


def _unlike(mine: Mapping[_Attribute, Any], other: Mapping[_Attribute, Any]) -> set[_Attribute]:
    missing = object()
    keys = {*mine, *other}
    return {k for k in keys if not _same(mine.get(k, missing), other.get(k, missing))}


def _same(a: Any, b: Any) -> bool:
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(_same, a, b))
    if isinstance(a, functools.partial):
        return a.func is b.func and _same(_given(a), _given(b))
    return isinstance(a, _PLAIN) and bool(a == b)


def _given(call: functools.partial[Any]) -> list[Any]:
    """What a partial call has been given, in an order."""
    return [call.args, sorted(call.keywords), [call.keywords[k] for k in sorted(call.keywords)]]


@contextlib.contextmanager
def _watch(m: nn.Module, attributes: set[_Attribute]) -> Iterator[set[_Attribute]]:
    """Collect which of the attributes are read."""
    seen: set[_Attribute] = set()
    kinds: list[tuple[nn.Module, type[nn.Module]]] = []
    for name, part in m.named_modules(remove_duplicate=False):
        own = {attribute for path, attribute in attributes if path == name}
        if own:
            kinds.append((part, type(part)))
            part.__class__ = _watching(type(part), name, own, seen)
    try:
        yield seen
    finally:
        for part, kind in kinds:
            part.__class__ = kind


def _watching(
    kind: type[nn.Module], path: str, attributes: set[str], seen: set[_Attribute]
) -> type[nn.Module]:
    """A class that looks like `kind` and notes the attributes that are read."""

    def watched(attribute: str) -> property:
        def read(self: nn.Module) -> Any:
            seen.add((path, attribute))
            if attribute not in vars(self):
                raise AttributeError(attribute)
            return vars(self)[attribute]

        def write(self: nn.Module, value: Any) -> None:
            vars(self)[attribute] = value

        return property(read, write)

    body: dict[str, Any] = {attribute: watched(attribute) for attribute in attributes}
    body |= {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    return type(kind.__name__, (kind,), body)
