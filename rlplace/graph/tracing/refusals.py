"""Why a module could not be captured: the user's own line, and a way out that fits the error."""

from __future__ import annotations

import re
import sysconfig
import traceback
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from torch import nn
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from rlplace.graph.tracing.modes import Guard

_STANDARD = tuple(sysconfig.get_path(name) for name in ("stdlib", "platstdlib"))
_PACKAGES = tuple(sysconfig.get_path(name) for name in ("purelib", "platlib"))
_TORCH = str(Path(torch.__file__).parent)
_OURS = str(Path(__file__).parents[2])


def explain(error: BaseException, module: nn.Module, guards: Sequence[Guard] = ()) -> str:
    """One message: what was refused, where in the user's code, why, and what to do.

    Args:
        error: What `torch.export` raised.
        module: What was captured.
        guards: The conditions on sizes that the trace came across.
    """
    name = type(module).__name__
    if fixed := _fixing(error, guards):
        at = where(fixed.stack)
        return (
            f"the batch of {name} cannot vary: {at or 'an op of the model'} asks for "
            f"{_readable(fixed.condition)}, so the batch would be a constant. Ways out: {_BATCH}"
        )
    at = where(traceback.extract_tb(error.__traceback__))
    text = " ".join(str(error).strip().split("\n\n")[0].split())
    reason = text if len(text) <= 300 else f"{text[:300]} ..."
    return (
        f"torch.export refused {name}{' at ' + at if at else ''}: {type(error).__name__}: "
        f"{reason.rstrip('.')}. Ways out: {way_out(error)}"
    )


_BATCH = (
    "use x.shape[0] instead of a number, of len(x) or of int(x.shape[0]); give view and reshape -1 "
    "or x.shape[0] where the batch is; do not loop over the batch; batch_dim names the batch dim "
    "where it is not dim 0"
)

#: Text in an error -> what to do about it; the first that fits.
_WAYS: tuple[tuple[str, str], ...] = (
    (
        r"no fake impl|Cannot find|register_fake|no kernel|'Meta'|meta.*not implemented",
        "tell torch the shapes that the op gives: @torch.library.register_fake('NAMESPACE::OP') "
        "for a custom op; or replace it by ops of torch",
    ),
    (
        r"\.numpy\(\)|numpy|as_tensor.*array",
        "values leave torch here (numpy, a list, a print): compute with torch ops, or make the op a"
        " custom op with torch.library.custom_op and register_fake",
    ),
    (
        r"data-dependent|data dependent|\.item\(\)|aten\._local_scalar_dense|aten\.nonzero"
        r"|Cannot copy out of meta|unhinted",
        "the code asks for the value of a tensor (if, while, range, int(), a boolean mask): choose "
        "with torch.where, multiply by a mask, or use torch.cond",
    ),
    (
        r"dtype|expected m1 and m2|same type",
        "autocast regions are traced in the module's own dtype: give inputs and module one dtype",
    ),
    (
        r"[Ee]xpected.*device|on device|same device",
        "make tensors on the device of an input (device=x.device) or as a buffer",
    ),
    (
        r"graph break|[Uu]nsupported|torch\.compile|FlexAttention",
        "use plain torch ops here (scaled_dot_product_attention for attention), or wrap this part "
        "with torch.library.custom_op and register_fake",
    ),
    (
        r"register a pytree|not a known type|Unsupported input type|not a valid input",
        "give forward tensors, numbers, and dicts, lists, tuples or dataclasses of them that "
        "torch.utils._pytree knows (torch.export.register_dataclass)",
    ),
)

_GENERAL = (
    "check that the module runs on these inputs; keep sizes other than the batch fixed, and wrap "
    "what torch.export does not take with torch.library.custom_op and register_fake"
)


def way_out(error: BaseException) -> str:
    """What to do about an error, by its kind."""
    if isinstance(error, GuardOnDataDependentSymNode):
        return _WAYS[2][1]
    text = f"{type(error).__name__} {error}"
    return next((advice for pattern, advice in _WAYS if re.search(pattern, text)), _GENERAL)


def where(stack: Iterable[traceback.FrameSummary]) -> str:
    """``FILE:LINE in FUNCTION`` of the innermost frame that is the user's own.

    Code of installed packages comes second (a model of a library), torch and the standard library
    do not count; empty if there is nothing else.
    """
    frames = list(stack)
    # What comes before our own first frame is the call of capture, not the model.
    ours = next((i for i, frame in enumerate(frames) if frame.filename.startswith(_OURS)), -1)
    inside = [frame for frame in frames[ours + 1 :] if not _is_machinery(frame.filename)]
    chosen = [frame for frame in inside if not frame.filename.startswith(_PACKAGES)] or inside
    if not chosen:
        return ""
    frame = chosen[-1]
    line = f" ({frame.line.strip()})" if frame.line else ""
    return f"{frame.filename}:{frame.lineno} in {frame.name}{line}"


def _is_machinery(file: str) -> bool:
    if file.startswith((_TORCH, _OURS, "<")):
        return True
    return file.startswith(_STANDARD) and not file.startswith(_PACKAGES)


def _fixing(error: BaseException, guards: Sequence[Guard]) -> Guard | None:
    """The condition that made a constant of the batch, if that is what went wrong."""
    if "specialized it to be a constant" not in str(error) and "Constraints violated" not in str(
        error
    ):
        return None
    equalities = [guard for guard in guards if guard.condition.startswith("Eq(")]
    return equalities[0] if equalities else None


def _readable(condition: str) -> str:
    """``Eq(4*s77, 32)`` -> ``4*batch == 32``."""
    inner = re.fullmatch(r"Eq\((.+), (.+)\)", condition)
    text = f"{inner[1]} == {inner[2]}" if inner else condition
    return re.sub(r"\bs\d+\b", "batch", text)
