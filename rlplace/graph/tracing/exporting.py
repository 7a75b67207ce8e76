"""`torch.export` of a module's twin, with the batch dynamic; another way where the first fails.

1. On the meta device, not strict: quick, and no memory whatever the size.
2. On fake tensors of a real device, where the model makes tensors of Python numbers (their values
   are lost on meta) or does something that the meta device refuses.
3. On meta, with ``len(tensor)`` as a size of the trace: as a plain number it fixes the batch.
4. The same with the batch as torch.export's `Dim.AUTO`: an input whose first dim is as long as the
   batch by chance (the two rows of an edge index) becomes static, with a warning.

Each way is deterministic, so a module gives the same program every time.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import sympy  # type: ignore[import-untyped]  # has no stubs
import torch
from torch import Tensor, fx, nn
from torch.export import Dim, ExportedProgram
from torch.export.graph_signature import InputKind
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.utils import _pytree as pytree

from rlplace.errors import CaptureError, InputError
from rlplace.graph.tracing.batch import BatchDim, batch_dims
from rlplace.graph.tracing.modes import (
    Guard,
    lean_tracing,
    quiet_tracing,
    symbolic_lengths,
    transparent_regions,
    watched_guards,
)
from rlplace.graph.tracing.refusals import explain
from rlplace.graph.tracing.regions import inline_regions
from rlplace.graph.tracing.repeats import trace_repeats_once
from rlplace.graph.tracing.twins import Twin, argument_names, make_twin


@dataclass(frozen=True)
class _Way:
    """A way to export.

    Args:
        device: ``meta``, or a device of fake tensors.
        lengths: Whether ``len(tensor)`` stays symbolic.
        hint: How the batch is marked.
    """

    device: str = "meta"
    lengths: bool = False
    hint: Any = field(default_factory=lambda: Dim.DYNAMIC)


def export(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    batch_dim: BatchDim = None,
) -> ExportedProgram:
    """Export a module; the graph has plain ops only, and every size is a number or of the batch.

    Raises:
        CaptureError: If `torch.export` refuses the module; says where in the user's code.
        InputError: If the inputs do not fit `forward`, or `batch_dim` does not fit the inputs.
    """
    guards: list[Guard] = []
    try:
        exported = _export(module, args, kwargs, batch_dim, _Way(), guards)
        if not lost_constants(exported):
            return _checked(exported, module)
    except (CaptureError, InputError):
        raise
    except Exception as error:
        return _checked(_otherwise(module, args, kwargs, batch_dim, error, guards), module)
    try:
        again = _export(module, args, kwargs, batch_dim, _Way(_real_device(module)), [])
    except Exception as error:
        raise CaptureError(lost_constants(exported)) from error
    return _checked(again, module)


def _otherwise(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    batch_dim: BatchDim,
    error: Exception,
    guards: list[Guard],
) -> ExportedProgram:
    """The other ways, after an error of the first."""
    fixed = "Constraints violated" in str(error) or "specialized" in str(error)
    if isinstance(error, GuardOnDataDependentSymNode):
        raise CaptureError(explain(error, module, guards)) from error
    ways = [_Way(_real_device(module))]
    if fixed:
        ways = [_Way(lengths=True), _Way(lengths=True, hint=Dim.AUTO)]
    shown = error
    for way in ways:
        try:
            exported = _export(module, args, kwargs, batch_dim, way, guards)
        except CaptureError:
            raise
        except Exception as other:
            # An error of a real device says more than "not on meta".
            shown = other if "meta" in str(shown) else shown
            continue
        if not lost_constants(exported):
            return exported
    raise CaptureError(explain(shown, module, guards)) from error


def _export(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    batch_dim: BatchDim,
    way: _Way,
    guards: list[Guard],
) -> ExportedProgram:
    names = argument_names(module.forward, args, kwargs)
    twin = make_twin(module, args, kwargs, way.device)
    dims = batch_dims(list(zip(names, (*twin.args, *twin.kwargs.values()), strict=True)), batch_dim)
    shapes: Any = torch.export.ShapesCollection()  # type: ignore[no-untyped-call]  # torch: untyped
    for tensor in pytree.tree_leaves((twin.args, twin.kwargs)):
        if id(tensor) in dims:
            shapes[tensor] = {dims[id(tensor)]: way.hint}
    dynamic = shapes.dynamic_shapes(twin.module, twin.args, twin.kwargs)
    with quiet_tracing(), watched_guards() as seen, lean_tracing():
        try:
            exported, functions = _run(twin, dynamic, way.lengths)
        finally:
            guards.extend(seen)
    if functions:
        warnings.warn(
            f"the backward of {', '.join(sorted(functions))} (torch.autograd.Function) is replaced "
            "by autograd's own of the ops in its forward; torch.library.custom_op with "
            "register_autograd keeps it",
            stacklevel=4,
        )
    if way.hint is Dim.AUTO:
        _warn_of_static(exported, len(dims))
    _inline(exported, module)
    return exported


def _run(twin: Twin, dynamic: Any, lengths: bool) -> tuple[ExportedProgram, set[str]]:
    sizes = symbolic_lengths() if lengths else contextlib.nullcontext()
    with sizes, transparent_regions() as functions, trace_repeats_once():
        exported = torch.export.export(
            twin.module, twin.args, twin.kwargs, dynamic_shapes=dynamic, strict=False
        )
    return exported, functions


def _inline(exported: ExportedProgram, module: nn.Module) -> None:
    trains = {
        name
        for name, param in module.named_parameters(remove_duplicate=False)
        if param.requires_grad
    }
    specs = exported.graph_signature.input_specs
    inline_regions(exported.graph_module, {s.arg.name for s in specs if s.target in trains})


def _warn_of_static(exported: ExportedProgram, marked: int) -> None:
    """Say which inputs became static; the first one must not."""
    inputs = [n for n in exported.graph.nodes if n.name in exported.graph_signature.user_inputs]
    tensors = [n for n in inputs if isinstance(n.meta.get("val"), Tensor)]
    moving = [node for node in tensors if _symbols(node.meta["val"])]
    if not moving or moving[0] is not tensors[0]:
        raise ValueError("the batch is a constant")
    if len(moving) < marked:
        names = ", ".join(node.name for node in tensors if node not in moving)
        warnings.warn(
            f"the model fixes the first dim of {names}, so it is not the batch (batch_dim says so)",
            stacklevel=5,
        )


def _real_device(module: nn.Module) -> str:
    """The device of a module's parameters; the CPU for one without storage."""
    device = next((param.device for param in module.parameters()), torch.device("cpu"))
    return "cpu" if device.type == "meta" else str(device)


def batch_symbols(exported: ExportedProgram) -> set[Any]:
    """Symbols of the batch in the shapes of the inputs; empty if the export made constants."""
    found: set[Any] = set()
    for node in exported.graph.nodes:
        if node.op == "placeholder":
            found |= _symbols(node.meta.get("val"))
    return found


def lost_constants(exported: ExportedProgram) -> str:
    """Why constants cannot be used: on meta, tensors made of numbers lose their values.

    Constants on the CPU, as `torch.tensor` makes them by default, keep theirs; so do buffers.
    """
    for spec in exported.graph_signature.input_specs:
        constant = exported.constants.get(spec.target or "")
        if spec.kind is InputKind.CONSTANT_TENSOR and getattr(constant, "is_meta", False):
            placeholder = next(n for n in exported.graph.nodes if n.name == spec.arg.name)
            modules = [n.meta.get("nn_module_stack") or {} for n in placeholder.users]
            owner = next((list(stack.values())[-1][0] for stack in modules if stack), "") or "root"
            shape = tuple(constant.shape) if isinstance(constant, Tensor) else ()
            return (
                f"the forward of module {owner!r} makes a tensor of {shape} from Python numbers "
                "(a list as an index, or torch.tensor(..., device=x.device)), and its values would "
                "be lost: make it once, in __init__, with register_buffer"
            )
    return ""


def _checked(exported: ExportedProgram, module: nn.Module) -> ExportedProgram:
    """Bound the sizes that depend on values, and refuse those that have no bound.

    What a boolean mask picks is counted as if it picked everything, with a warning.
    """
    known = batch_symbols(exported)
    bounded: list[str] = []
    for node in exported.graph.nodes:
        unknown = _symbols(node.meta.get("val")) - known
        if node.op != "call_function" or not unknown:
            continue
        bound = _most(node)
        if bound is None:
            raise CaptureError(_unbounded(node, module))
        symbols = shape_env(exported)
        symbols.replacements |= dict.fromkeys(unknown, bound)
        symbols._replacements_version_counter += 1  # expressions that were read before are stale
        symbols._update_version_counter()
        bounded.append(_name(node))
    if bounded:
        warnings.warn(
            f"what {', '.join(dict.fromkeys(bounded))} picks depends on values; it is counted as "
            "if it picked everything",
            stacklevel=5,
        )
    return exported


def shape_env(exported: ExportedProgram) -> Any:
    """What knows the symbols of an exported program."""
    values = (node.meta.get("val") for node in exported.graph.nodes)
    sizes: Iterator[Any] = (d for v in values if isinstance(v, Tensor) for d in v.shape)
    return next(size.node.shape_env for size in sizes if isinstance(size, torch.SymInt))


def _most(node: fx.Node) -> Any:
    """The most elements that an op can pick, as an expression of the batch; None if unknown."""
    source: Any = node.args[0] if node.args else None
    if _name(node) == "index":
        indices = (i for i in node.args[1] or () if isinstance(i, fx.Node))  # type: ignore[union-attr]  # a list
        masks = [i for i in indices if i.meta["val"].dtype in (torch.bool, torch.uint8)]
        source = masks[0] if masks else None
    elif _name(node) == "masked_select":
        source = node.args[1]
    elif _name(node) not in ("nonzero", "nonzero_numpy", "_unique2", "unique_dim", "argwhere"):
        return None
    if not isinstance(source, fx.Node):
        return None
    return sympy.Mul(*(_expression(size) for size in source.meta["val"].shape))


def _expression(size: Any) -> Any:
    return size.node.expr if isinstance(size, torch.SymInt) else sympy.Integer(size)


def _unbounded(node: fx.Node, module: nn.Module) -> str:
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    owner = (stack[-1][0] if stack else "") or type(module).__name__
    return (
        f"op {_name(node)} in the forward of {owner} gives a tensor or number that depends on the "
        "values of its input, so nothing behind it can be counted. Ways out: keep a number as a "
        "tensor (no int(), float() or item()), give repeat_interleave its output_size, pass sizes "
        "(num_nodes) as numbers, and choose with torch.where"
    )


def _symbols(value: Any) -> set[Any]:
    if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
        return set(value.node.expr.free_symbols)
    if isinstance(value, Tensor):
        return {s for dim in value.shape if isinstance(dim, torch.SymInt) for s in _symbols(dim)}
    if isinstance(value, list | tuple):
        return {symbol for item in value for symbol in _symbols(item)}
    return set()


def _name(node: fx.Node) -> str:
    return str(getattr(getattr(node.target, "overloadpacket", None), "__name__", node.target))
