"""From a module to an exported program, and from there to executable pieces of it.

Capture, the search for layouts and the runtime all see a model through these two functions, so a
group means the same nodes to each of them: `export_program` runs `torch.export`, `extract` makes
a module of any set of its nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.export.graph_signature import InputKind

from rlplace.errors import InputError
from rlplace.graph.tracing.batch import BatchDim
from rlplace.graph.tracing.exporting import export
from rlplace.graph.tracing.twins import TARGETS, Loss, Targets, shallow, with_loss

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
    module: nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    loss: Loss | None = None,
    targets: Targets | None = None,
    batch_dim: BatchDim = None,
) -> Program:
    """Export a module with a dynamic batch dim.

    The module itself is not touched: a twin without storage is exported.

    Args:
        module: On any device.
        args: Positional example inputs, of a batch of at least 2.
        kwargs: Keyword example inputs.
        loss: A loss outside of the module, see `rlplace.graph.tracing.twins.with_loss`.
        targets: What it takes beside the output; an input of the program named ``targets``.
        batch_dim: Where the batch is, see `tracing.batch.batch_dims`; by default dim 0.

    Raises:
        CaptureError: If `torch.export` refuses the module; says where in the user's code.
        InputError: If the inputs do not fit `forward`, or `batch_dim` does not fit the inputs.
    """
    call = dict(kwargs or {})
    if targets is not None and loss is None:
        raise InputError("targets", type(targets).__name__, "targets need a loss")
    if loss is not None:
        module = with_loss(shallow(module), loss)
        call |= {} if targets is None else {TARGETS: targets}
    return _program(export(module, args, call, batch_dim), module)


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
    outside = {by_name[name] for name in reads}
    for node in nodes:
        copies[node] = graph.node_copy(node, lambda source: copies[source])
        _move(copies[node], torch.device(device))
        if writes_in_place(node) and (node.args[0] in outside or _spoils(node)):
            copies[node].target = _out_of_place(node.target)
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


#: Ops whose backward needs their result.
_KEEP_RESULT = ("softmax", "_softmax", "log_softmax", "exp", "sigmoid", "tanh", "sqrt", "rsqrt")


def _spoils(node: fx.Node) -> bool:
    """Whether an op writes into what the backward of its maker needs.

    Autograd refuses that. It comes from the forward of a `torch.autograd.Function`, which has a
    backward of its own that the export does not keep.
    """
    base = node.args[0]
    if not isinstance(base, fx.Node) or not isinstance(base.target, torch._ops.OpOverload):
        return False
    last = all(user is node or user < node for user in base.users)
    return last and base.target.overloadpacket.__name__ in _KEEP_RESULT


def _out_of_place(target: Any) -> Any:
    """``add`` for ``add_``: what a piece reads is another's, and a leaf of its backward pass.

    Groups are cut so that nothing else reads a tensor after it was written into.
    """
    packet = getattr(torch.ops.aten, target._schema.name.removeprefix("aten::").rstrip("_"), None)
    return getattr(packet, target._overloadname, target)


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
