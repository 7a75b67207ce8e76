"""What is exported in a module's place: a copy without storage, called as the user calls it.

The user's module is not touched and not run, and the twin gives the same nodes wherever the
module's parameters are (libraries branch on the device).
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
import types
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils import _pytree as pytree

from rlplace.errors import CaptureError, InputError

#: A loss outside of the module: ``loss(output, *targets)`` (or ``**targets``) -> scalar.
Loss = Callable[..., Tensor]
Targets = Tensor | tuple[Any, ...] | Mapping[str, Any]

#: The keyword under which a module with an outside loss takes its targets.
TARGETS = "targets"


@dataclasses.dataclass(frozen=True)
class Twin:
    """A module without storage, and the call that it is exported with."""

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def make_twin(
    module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], device: str
) -> Twin:
    """The twin of a module and of its inputs.

    Args:
        module: On any device.
        args: Positional inputs.
        kwargs: Keyword inputs.
        device: ``meta``, or any other device for fake tensors on it: what a model makes of Python
            numbers keeps its values there, and code that asks for the device gets a real one.

    Returns:
        Its inputs are objects of their own each: `torch.export` takes one tensor that is passed
        twice (ids that serve as labels) for a single input, and would ignore the other argument.
    """
    fake = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())

    def empty(tensor: Tensor, grad: bool) -> Tensor:
        if device == "meta":
            return torch.empty_like(tensor, device="meta", requires_grad=grad)
        with fake:
            size, stride = tensor.size(), tensor.stride()
            made = torch.empty_strided(size, stride, dtype=tensor.dtype, device=device)
            return made.requires_grad_(grad)

    def twin(leaf: Any) -> Any:
        return empty(leaf, leaf.requires_grad) if isinstance(leaf, Tensor) else leaf

    twins = pytree.tree_map(twin, (args, dict(kwargs)))
    made = copied(module, lambda tensor: empty(tensor, False))
    _name_arguments(made, *twins)
    return Twin(made, *twins)


def meta_twin(module: nn.Module) -> nn.Module:
    """A deep copy of a module whose parameters and buffers have no storage; ties are kept."""
    return copied(module, lambda tensor: torch.empty_like(tensor, device="meta"))


def copied(module: nn.Module, empty: Callable[[Tensor], Tensor]) -> nn.Module:
    """A deep copy of a module with other parameters and buffers; ties are kept."""
    memo: dict[int, Any] = {}
    for param in module.parameters():
        memo[id(param)] = nn.Parameter(empty(param), requires_grad=param.requires_grad)
    for buffer in module.buffers():
        memo[id(buffer)] = empty(buffer)
    return copy.deepcopy(module, memo)


def with_loss(module: nn.Module, loss: Loss) -> nn.Module:
    """Put a loss behind a module, so that it is captured and run with the module.

    Args:
        module: Changed in place: its forward takes ``targets`` as well, a tensor, a tuple or a
            dict, and returns ``loss(output, *targets)`` (a dict: ``**targets``). Its state dict
            stays as it is, but for a loss that has parameters or buffers of its own (``loss.*``).
        loss: A function, or a module such as `nn.CrossEntropyLoss`; gives the mean over the batch.

    Returns:
        The same module.

    Raises:
        InputError: If the module's forward has an argument ``targets`` of its own.
    """
    inner: Any = module.forward
    if TARGETS in inspect.signature(inner).parameters:
        rule = "forward has an argument 'targets' of its own: compute the loss inside of it"
        raise InputError("loss", getattr(loss, "__name__", type(loss).__name__), rule)
    name = "loss" if not hasattr(module, "loss") else "loss_function"
    if isinstance(loss, nn.Module) and loss.state_dict():
        module.add_module(name, loss)
    called: Any = inner.__func__ if inspect.ismethod(inner) else lambda _, *a, **k: inner(*a, **k)

    def forward(self: nn.Module, *args: Any, targets: Any = (), **kwargs: Any) -> Tensor:
        # A module may go through all of its children (nn.Sequential); the loss is none of them.
        child = self._modules.pop(name, None)
        try:
            output = called(self, *args, **kwargs)
        finally:
            if child is not None:
                self._modules[name] = child
        function: Loss = loss if child is None else child
        if isinstance(targets, Mapping):
            return function(output, **targets)
        return function(output, *((targets,) if isinstance(targets, Tensor) else targets))

    forward.__signature__ = _with_targets(inspect.signature(inner))  # type: ignore[attr-defined]
    # A method, not a function: a deep copy of the module has it bound to the copy.
    module.forward = types.MethodType(forward, module)
    return module


def _with_targets(signature: inspect.Signature) -> inspect.Signature:
    """A signature with ``self`` in front and the keyword ``targets``."""
    extra = inspect.Parameter(TARGETS, inspect.Parameter.KEYWORD_ONLY, default=())
    own = [inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)]
    given = list(signature.parameters.values())
    last = next((i for i, p in enumerate(given) if p.kind is p.VAR_KEYWORD), len(given))
    own += [*given[:last], extra, *given[last:]]
    if given and given[0].kind is not inspect.Parameter.POSITIONAL_ONLY:
        own[0] = own[0].replace(kind=inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return signature.replace(parameters=own)


def shallow(module: nn.Module) -> nn.Module:
    """A copy of a module that can be given another forward and children; all else is shared."""
    made = copy.copy(module)
    made._modules = dict(module._modules)
    return made


def _name_arguments(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Give a twin a forward with one named argument for each given one, and plain outputs.

    ``*args`` and ``**kwargs`` are spelled out, for `torch.export` wants names; what the call
    leaves out is no argument. Outputs are flattened, see `outputs_of`.
    """
    inner = module.forward
    names = argument_names(inner, args, kwargs)

    def forward(*args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
        return outputs_of(inner(*args, **kwargs))

    kind = inspect.Parameter
    parameters = [kind(name, kind.POSITIONAL_OR_KEYWORD) for name in names[: len(args)]]
    parameters += [kind(name, kind.KEYWORD_ONLY) for name in names[len(args) :]]
    forward.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    module.forward = forward


def argument_names(
    forward: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> list[str]:
    """A name for each argument of a call: positional ones first, then the keywords in order.

    Raises:
        InputError: If forward does not take them.
    """
    signature = inspect.signature(forward)
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        rule = f"does not fit forward{signature}: {error}"
        raise InputError("inputs", [*(["positional"] * len(args)), *kwargs], rule) from error
    names: list[str] = []
    for parameter in signature.parameters.values():
        left = len(args) - len(names)
        if parameter.kind is parameter.VAR_POSITIONAL:
            names += [f"{parameter.name}_{index}" for index in range(left)]
        elif left and parameter.kind is not parameter.KEYWORD_ONLY:
            names.append(parameter.name)
    return [*names[: len(args)], *kwargs]


def outputs_of(output: Any) -> tuple[Tensor, ...]:
    """The tensors of an output, each once; the loss alone where there is one.

    A loss is a scalar float: the output itself, its item or field ``loss``, or its first tensor.
    What a model returns beside its loss gets no gradient from a training step.

    Raises:
        CaptureError: If there is no tensor.
    """
    named = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(named, Tensor) and _is_scalar(named):
        return (named,)
    tensors = list({id(tensor): tensor for tensor in _leaves(output)}.values())
    if not tensors:
        raise CaptureError(f"forward returned {type(output).__name__}, and no tensor in it")
    return tuple(tensors[:1] if _is_scalar(tensors[0]) else tensors)


def _is_scalar(tensor: Tensor) -> bool:
    return tensor.ndim == 0 and tensor.is_floating_point()


def _leaves(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, Mapping):
        return [leaf for item in value.values() for leaf in _leaves(item)]
    if isinstance(value, list | tuple):
        return [leaf for item in value for leaf in _leaves(item)]
    if dataclasses.is_dataclass(value):
        fields = dataclasses.fields(value)
        return [leaf for field in fields for leaf in _leaves(getattr(value, field.name))]
    if type(value) in pytree.SUPPORTED_NODES:
        return [leaf for item in pytree.tree_leaves(value) for leaf in _leaves(item)]
    if not isinstance(value, str | int | float | complex | None):
        warnings.warn(
            f"forward returns a {type(value).__name__}, whose tensors are not outputs of the graph"
            " (torch.utils._pytree.register_pytree_node makes them known)",
            stacklevel=2,
        )
    return []
