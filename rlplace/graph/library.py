"""Models by name, without a download: as modules with random weights, and as op graphs.

A graph that was captured before comes from the cache, and then neither torch nor transformers is
imported.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Literal, get_args

from rlplace.errors import InputError, nearest_names
from rlplace.graph.cache import cache_path, load_graph, store_graph
from rlplace.graph.models.check import check_names, check_shape
from rlplace.graph.models.named import MODELS
from rlplace.graph.models.shapes import FAMILIES, Shape
from rlplace.graph.types import TP_DEGREES, OpGraph

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

Dtype = Literal["float32", "bfloat16", "float16"]
Argument = str | int | float | bool | None
_UNTIED = "-untied"


@dataclass(frozen=True)
class Spec:
    """A model of the library: what it is, how to make it, and random data for it.

    Args:
        name: As it was asked for.
        family: A key of `FAMILIES`.
        shape: Its shape.
    """

    name: str
    family: str
    shape: Shape

    def make(self, dtype: Dtype = "float32") -> nn.Module:
        """The module in training mode, with random weights, on torch's default device.

        Its forward takes the keyword tensors of `example` and returns the loss, a scalar: the mean
        over the samples. Seed torch first for weights that can be had again.

        Args:
            dtype: Of its parameters and buffers. The op graph does not depend on it: floats are
                counted in elements, and their bytes are the precision of the instance.

        Raises:
            MissingExtraError: If transformers is needed and not installed.
        """
        from rlplace.graph.models.make import make

        wanted = _dtype(dtype)
        module = make(self.shape)
        return module if dtype == "float32" else module.to(wanted)

    def example(self, batch: int, seed: int = 0, dtype: Dtype = "float32") -> dict[str, Tensor]:
        """Random keyword inputs of `batch` samples on the CPU, labels included."""
        from rlplace.graph.models.make import draw

        return draw(self.shape, batch, seed, _dtype(dtype))

    @property
    def tokens_per_sample(self) -> int:
        """Length of the sequence, 1 for a model of images or clicks."""
        return getattr(self.shape, "seq_len", 1)

    @property
    def source(self) -> dict[str, Argument]:
        """Name and arguments that give this model again through `spec`."""
        return {"name": self.name, **asdict(self.shape)}


def spec(name: str, *, seq_len: int | None = None, **shape: Argument) -> Spec:
    """A model by its name, or a family with a shape.

    Args:
        name: A key of `MODELS` (``-untied`` may be appended) or of `FAMILIES`.
        seq_len: Tokens of a sample; None for the model's own.
        shape: Fields of the family's shape that differ.

    Raises:
        InputError: On an unknown name, a field that the family does not have, or an illegal value.
    """
    base = name.removesuffix(_UNTIED)
    if base in MODELS:
        family, default = MODELS[base]
    elif base in FAMILIES:
        family, default = base, FAMILIES[base]()
    else:
        known = sorted({*MODELS, *FAMILIES})
        rule = "no model or family of the library has this name"
        raise InputError("model", name, rule, nearest_names(name, known) or ", ".join(known))
    changes = dict(shape)
    if seq_len is not None:
        changes["seq_len"] = seq_len
    if base != name:
        changes["tie_embeddings"] = False
    check_names(family, default, changes)
    made = replace(default, **changes)  # type: ignore[arg-type]
    check_shape(made)
    return Spec(name, family, made)


def build(
    name: str,
    *,
    seq_len: int | None = None,
    degrees: tuple[int, ...] = TP_DEGREES,
    cache: bool = True,
    **shape: Argument,
) -> OpGraph:
    """The op graph of a library model.

    Args:
        name: As in `spec`.
        seq_len: As in `spec`.
        degrees: Degrees of the tp axis to find layouts for.
        cache: Whether to look into the cache, and to write to it.
        shape: As in `spec`.

    Raises:
        InputError: As in `spec`.
        MissingExtraError: If the model has to be captured and transformers is not installed.
    """
    wanted = spec(name, seq_len=seq_len, **shape)
    path = cache_path({**wanted.source, "degrees": [*degrees]})
    if cache and (found := load_graph(path)) is not None:
        return found
    graph = _capture(wanted, degrees)
    if cache:
        store_graph(path, graph)
    return graph


def _capture(wanted: Spec, degrees: tuple[int, ...]) -> OpGraph:
    import torch

    from rlplace.graph.capture import capture
    from rlplace.graph.models.make import empty

    with torch.device("meta"):
        module = wanted.make()
    return capture(
        module,
        kwargs=empty(wanted.shape, 2),
        name=wanted.name,
        tokens_per_sample=wanted.tokens_per_sample,
        source=wanted.source,
        degrees=degrees,
    )


def _dtype(name: str) -> torch.dtype:
    import torch

    known = get_args(Dtype)
    if name not in known:
        rule = f"must be one of {', '.join(known)}"
        raise InputError("dtype", name, rule, nearest_names(name, known) or known[0])
    made: torch.dtype = getattr(torch, name)
    return made
