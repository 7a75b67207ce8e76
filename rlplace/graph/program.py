"""From a module to an exported program, and from there to executable pieces of it.

Capture, the search for layouts and the runtime all see a model through these two functions, so a
group means the same nodes to each of them: `export_program` runs `torch.export`, `extract` makes
a module of any set of its nodes.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.export.graph_signature import InputKind

from rlplace.errors import CaptureError
from rlplace.graph.tracing import lean_tracing

_STATE_KINDS = (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR)


@dataclass(frozen=True)
class Program:
    """An exported model.

    Args:
        exported: What `torch.export` gave; its placeholders are states and user inputs.
        states: Placeholder -> fully qualified name of its parameter, buffer or constant; tied
            parameters have the first name that `named_parameters` gives.
        trainable: Fully qualified names of the parameters that require a gradient.
        inputs: Placeholders of the user's tensors, in the order of the flattened call.
        prologue: Nodes that depend on user inputs, buffers and constants only (masks, positions,
            shapes). They are cheap, so each stage computes those that it reads again.
        outputs: Nodes that the program returns; the first one is the loss where it is a scalar.
        unflatten: Turns (args, kwargs) of a call into tensors in the order of `inputs`.
    """

    exported: torch.export.ExportedProgram
    states: Mapping[str, str]
    trainable: frozenset[str]
    inputs: tuple[str, ...]
    prologue: frozenset[str]
    outputs: tuple[str, ...]
    unflatten: Callable[[tuple[Any, ...], dict[str, Any]], list[Any]]

    @property
    def nodes(self) -> list[fx.Node]:
        """Nodes that do something, in order: no placeholders, no output, no metadata asserts."""
        return [node for node in self.exported.graph.nodes if _does_something(node)]

    def body(self) -> list[fx.Node]:
        """`nodes` without the prologue: what groups are made of."""
        return [node for node in self.nodes if node.name not in self.prologue]


@dataclass(frozen=True)
class Piece:
    """Some nodes of a program as a module.

    `module(*states, *inputs, *reads)` returns a tuple of tensors in the order of `writes`.

    Args:
        module: The graph; it has no parameters of its own.
        states: (placeholder, fully qualified name) of the parameters, buffers and constants.
        inputs: Placeholders of the user's tensors that it needs.
        reads: Nodes of other pieces that it needs.
        writes: Its nodes that other pieces or the caller need.
    """

    module: fx.GraphModule
    states: tuple[tuple[str, str], ...]
    inputs: tuple[str, ...]
    reads: tuple[str, ...]
    writes: tuple[str, ...]


def export_program(
    module: nn.Module, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
) -> Program:
    """Export a module with a dynamic batch dim, on the meta device.

    The module itself is not touched: a twin without storage is exported, so that the same module
    gives the same nodes wherever its parameters are (libraries branch on the device).

    Args:
        module: Takes tensors whose dim 0 is the batch; on any device.
        args: Positional example inputs, of a batch of at least 2.
        kwargs: Keyword example inputs.

    Raises:
        CaptureError: If `torch.export` refuses the module; says where in the user's code.
    """
    call_args, call_kwargs = _meta_inputs((args, dict(kwargs or {})))
    twin = meta_twin(module)
    shapes = torch.export.ShapesCollection()  # type: ignore[no-untyped-call]
    batch = _batch(call_args, call_kwargs)
    for tensor in _tensors(call_args, call_kwargs):
        if tensor.ndim and tensor.shape[0] == batch:
            shapes[tensor] = {0: torch.export.Dim.DYNAMIC}
    dynamic = shapes.dynamic_shapes(twin, call_args, call_kwargs)  # type: ignore[no-untyped-call]
    try:
        with lean_tracing():
            exported = torch.export.export(
                twin, call_args, call_kwargs, dynamic_shapes=dynamic, strict=False
            )
    except Exception as error:
        raise CaptureError(_explain(error, module)) from error
    _check_constants(exported)
    return _program(exported, module)


def _check_constants(exported: torch.export.ExportedProgram) -> None:
    """Refuse tensors that the model makes of numbers on its inputs' device: they have no values.

    Constants on the CPU, as `torch.tensor` makes them by default, keep theirs; so do buffers.
    """
    for spec in exported.graph_signature.input_specs:
        constant = exported.constants.get(spec.target or "")
        if spec.kind is InputKind.CONSTANT_TENSOR and getattr(constant, "is_meta", False):
            placeholder = next(n for n in exported.graph.nodes if n.name == spec.arg.name)
            modules = [n.meta.get("nn_module_stack") or {} for n in placeholder.users]
            owner = next((list(stack.values())[-1][0] for stack in modules if stack), "") or "root"
            raise CaptureError(
                f"the forward of module {owner!r} makes a tensor of {tuple(constant.shape)} from "
                "Python numbers (a list as an index, or torch.tensor(..., device=x.device)), and "
                "its values would be lost: make it once, in __init__, with register_buffer"
            )


def meta_twin(module: nn.Module) -> nn.Module:
    """A deep copy of a module whose parameters and buffers have no storage; ties are kept."""
    memo: dict[int, Any] = {}
    for param in module.parameters():
        empty = torch.empty_like(param, device="meta")
        memo[id(param)] = nn.Parameter(empty, requires_grad=param.requires_grad)
    for buffer in module.buffers():
        memo[id(buffer)] = torch.empty_like(buffer, device="meta")
    return copy.deepcopy(module, memo)


def extract(
    program: Program,
    names: Iterable[str],
    writes: Sequence[str] | None = None,
    device: str = "meta",
) -> Piece:
    """The piece made of the named nodes.

    Args:
        program: The exported program.
        names: Nodes of `Program.nodes`. What they need of the prologue is among `Piece.reads`; the
            prologue itself is a piece too: ``extract(program, prologue_of(program, reads))``.
        writes: Nodes to return; by default those that nodes outside of the set (or the program's
            caller) read.
        device: Where the piece will run: tensors that it makes itself (positions, masks) are made
            there, for the export has the meta device burnt in.
    """
    inside = set(names)
    nodes = [node for node in program.nodes if node.name in inside]
    if writes is None:
        writes = tuple(node.name for node in nodes if _leaves(node, inside))
    outer = _outer_inputs(nodes, inside)
    states = tuple((name, program.states[name]) for name in outer if name in program.states)
    inputs = tuple(name for name in outer if name in program.inputs)
    known = {name for name, _ in states} | set(inputs)
    reads = tuple(name for name in outer if name not in known)
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    by_name = {node.name: node for node in program.exported.graph.nodes}
    for name in (*(name for name, _ in states), *inputs, *reads):
        copies[by_name[name]] = graph.placeholder(name)
        copies[by_name[name]].meta = dict(by_name[name].meta)
    for node in nodes:
        copies[node] = graph.node_copy(node, lambda source: copies[source])
        _move(copies[node], torch.device(device))
    graph.output(tuple(copies[by_name[name]] for name in writes))
    piece = fx.GraphModule(torch.nn.Module(), graph)
    return Piece(piece, states, inputs, reads, tuple(writes))


def prologue_of(program: Program, names: Iterable[str]) -> tuple[str, ...]:
    """The prologue nodes among `names` and all that they depend on, in order.

    What writes into one of these tensors in place is among them too.
    """
    needed: set[str] = set()

    def need(node: fx.Node) -> None:
        needed.update({node.name, base_of(node).name} & program.prologue)

    by_name = {node.name: node for node in program.nodes}
    for name in program.prologue & set(names):
        need(by_name[name])
    for node in reversed(program.nodes):
        writes = node.name in program.prologue and writes_in_place(node)
        if node.name in needed or (writes and base_of(node).name in needed):
            needed.add(node.name)
            for source in node.all_input_nodes:
                need(source)
    return tuple(node.name for node in program.nodes if node.name in needed)


def writes_in_place(node: fx.Node) -> bool:
    """Whether an op writes into its first argument."""
    target = node.target
    return isinstance(target, torch._ops.OpOverload) and target._schema.is_mutable


def base_of(node: fx.Node) -> fx.Node:
    """The node that made the tensor which a node is a view of, or writes into."""
    while writes_in_place(node) or getattr(node.target, "is_view", False):
        source = node.args[0]
        if not isinstance(source, fx.Node):
            break
        node = source
    return node


def _move(node: fx.Node, device: torch.device) -> None:
    """Replace the device that the export burnt into a node's arguments."""

    def moved(argument: Any) -> Any:
        return device if isinstance(argument, torch.device) else argument

    node.args = torch.utils._pytree.tree_map(moved, node.args)
    node.kwargs = torch.utils._pytree.tree_map(moved, node.kwargs)


def _program(exported: torch.export.ExportedProgram, module: nn.Module) -> Program:
    canonical = _canonical_names(module)
    specs = exported.graph_signature.input_specs
    states = {
        spec.arg.name: canonical.get(spec.target or "", spec.target or "")
        for spec in specs
        if spec.kind in _STATE_KINDS
    }
    params = {spec.arg.name for spec in specs if spec.kind is InputKind.PARAMETER}
    inputs = tuple(spec.arg.name for spec in specs if spec.kind is InputKind.USER_INPUT)
    in_spec = exported.call_spec.in_spec

    def unflatten(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        flat, spec = torch.utils._pytree.tree_flatten((args, kwargs))
        if in_spec is not None and spec != in_spec:
            raise ValueError(f"inputs are {spec}, the model was captured with {in_spec}")
        return flat

    output = next(node for node in exported.graph.nodes if node.op == "output")
    return Program(
        exported=exported,
        states=states,
        trainable=frozenset(n for n, p in module.named_parameters() if p.requires_grad),
        inputs=inputs,
        prologue=_prologue(exported.graph, params),
        outputs=tuple(n.name for n in output.args[0] if isinstance(n, fx.Node)),
        unflatten=unflatten,
    )


def _canonical_names(module: nn.Module) -> dict[str, str]:
    """Every name of a parameter or buffer -> the first name of the same tensor."""
    first: dict[int, str] = {}
    names: dict[str, str] = {}
    for iterate in (module.named_parameters, module.named_buffers):
        for name, tensor in iterate(remove_duplicate=False):
            names[name] = first.setdefault(id(tensor), name)
    return names


def _prologue(graph: fx.Graph, params: set[str]) -> frozenset[str]:
    found: set[str] = set()
    tainted = set(params)
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        if any(source.name in tainted for source in node.all_input_nodes) or _has_effect(node):
            tainted.add(node.name)
        else:
            found.add(node.name)
    return frozenset(found)


def _has_effect(node: fx.Node) -> bool:
    """Whether a node draws random numbers, or writes into a state or an input."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return False
    drawn = torch.Tag.nondeterministic_seeded in target.tags
    return drawn or (writes_in_place(node) and base_of(node).op == "placeholder")


def _does_something(node: fx.Node) -> bool:
    return node.op == "call_function" and "_assert" not in getattr(node.target, "__name__", "")


def _outer_inputs(nodes: Sequence[fx.Node], inside: set[str]) -> list[str]:
    """What the nodes read from outside, each name once, in order of first use."""
    found: dict[str, None] = {}
    for node in nodes:
        for source in node.all_input_nodes:
            if source.name not in inside:
                found.setdefault(source.name)
    return list(found)


def _leaves(node: fx.Node, own: set[str]) -> bool:
    return any(user.name not in own and _reads(user) for user in node.users)


def _reads(user: fx.Node) -> bool:
    return user.op == "output" or _does_something(user)


def _tensors(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    leaves = torch.utils._pytree.tree_leaves((args, dict(kwargs)))
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


def _batch(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
    sizes = [tensor.shape[0] for tensor in _tensors(args, kwargs) if tensor.ndim]
    if not sizes or sizes[0] < 2:
        size = sizes[0] if sizes else "none"
        raise CaptureError(
            f"the first tensor input must have a batch dim of at least 2, it has {size}: "
            "torch.export makes a constant of a batch of one; pass a batch of 2 or more"
        )
    return sizes[0]


def _meta_inputs(call: tuple[Any, dict[str, Any]]) -> tuple[Any, dict[str, Any]]:
    """The inputs without storage, and every tensor an object of its own.

    `torch.export` takes one tensor that is passed twice (ids that serve as labels) for a single
    input, and then the other argument is silently ignored.
    """

    def twin(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return torch.empty_like(leaf, device="meta", requires_grad=leaf.requires_grad)
        return leaf

    twins: tuple[Any, dict[str, Any]] = torch.utils._pytree.tree_map(twin, call)
    return twins


def _explain(error: Exception, module: nn.Module) -> str:
    """One message with the user's own line, where the traceback or the error names one."""
    place = ""
    trace = error.__traceback__
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if "/torch/" not in file and "/rlplace/" not in file and not file.startswith("<"):
            place = f" at {file}:{trace.tb_lineno} in {trace.tb_frame.f_code.co_name}"
        trace = trace.tb_next
    first = str(error).strip().split("\n")[0]
    return (
        f"torch.export refused {type(module).__name__}{place}: {type(error).__name__}: {first}. "
        "Ways out: avoid branches and loops on tensor values (torch.where, torch.cond), give "
        "static shapes to everything but the batch, or wrap the refused part in a custom op"
    )
