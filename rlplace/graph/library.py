"""Models by name, without a download: as modules with random weights, and as op graphs.

A graph that was captured before comes from the cache, and then neither torch nor transformers is
imported.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

from rlplace.errors import InputError, nearest_names
from rlplace.graph.cache import cache_path, load_graph, store_graph
from rlplace.graph.models.check import check_names, check_shape
from rlplace.graph.models.shapes import (
    FAMILIES,
    MODELS,
    T5,
    Bert,
    Dlrm,
    Gpt,
    Llama,
    Mixtral,
    ResNet,
    Shape,
    Vit,
)
from rlplace.graph.types import OpGraph

if TYPE_CHECKING:
    from torch import Tensor, nn

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

    def make(self) -> nn.Module:
        """The module in training mode, with random weights, on torch's default device.

        Its forward takes the keyword tensors of `example` and returns the loss, a scalar: the mean
        over the samples. Seed torch first for weights that can be had again.

        Raises:
            MissingExtraError: If transformers is needed and not installed.
        """
        from rlplace.graph.models import dlrm, transformer

        match self.shape:
            case Gpt():
                return transformer.make_gpt(self.shape)
            case Llama():
                return transformer.make_llama(self.shape)
            case Mixtral():
                return transformer.make_mixtral(self.shape)
            case Bert():
                return transformer.make_bert(self.shape)
            case T5():
                return transformer.make_t5(self.shape)
            case Vit():
                return transformer.make_vit(self.shape)
            case ResNet():
                return transformer.make_resnet(self.shape)
            case Dlrm():
                return dlrm.DlrmLoss(self.shape)

    def example(self, batch: int, seed: int = 0) -> dict[str, Tensor]:
        """Random keyword inputs of `batch` samples on the CPU, labels included."""
        import torch

        generator = torch.Generator().manual_seed(seed)

        def ids(high: int, *size: int) -> Tensor:
            return torch.randint(0, high, (batch, *size), generator=generator)

        def normal(*size: int) -> Tensor:
            return torch.randn((batch, *size), generator=generator)

        match self.shape:
            case T5(vocab=vocab, seq_len=length):
                pair = {"input_ids": ids(vocab, length), "labels": ids(vocab, length)}
                return pair | {"decoder_input_ids": pair["labels"].roll(1, dims=1)}
            case Vit() | ResNet():
                image, classes = self.shape.image, self.shape.classes
                return {"pixel_values": normal(3, image, image), "labels": ids(classes)}
            case Dlrm(dense=dense, tables=tables, bag=bag, rows=rows):
                inputs = {"dense": normal(dense), "indices": ids(rows, tables, bag)}
                return inputs | {"labels": ids(2).float()}
            case _:
                tokens = ids(self.shape.vocab, self.shape.seq_len)
                return {"input_ids": tokens, "labels": tokens.clone()}

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
    name: str, *, seq_len: int | None = None, cache: bool = True, **shape: Argument
) -> OpGraph:
    """The op graph of a library model.

    Args:
        name: As in `spec`.
        seq_len: As in `spec`.
        cache: Whether to look into the cache, and to write to it.
        shape: As in `spec`.

    Raises:
        InputError: As in `spec`.
        MissingExtraError: If the model has to be captured and transformers is not installed.
    """
    wanted = spec(name, seq_len=seq_len, **shape)
    path = cache_path(wanted.source)
    if cache and (found := load_graph(path)) is not None:
        return found
    graph = _capture(wanted)
    if cache:
        store_graph(path, graph)
    return graph


def _capture(wanted: Spec) -> OpGraph:
    import torch

    from rlplace.graph.capture import capture

    with torch.device("meta"):
        module = wanted.make()
    return capture(
        module,
        kwargs=wanted.example(2),
        name=wanted.name,
        tokens_per_sample=wanted.tokens_per_sample,
        source=wanted.source,
    )
