"""A checkpoint read into the ranks of another plan."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from rlplace.errors import InputError
from rlplace.graph.types import Replicate, Shard
from rlplace.runtime.holdings import Holding, Piece
from rlplace.runtime.manifest import read_manifest
from rlplace.runtime.shard import shard_parameter, unshard
from rlplace.runtime.storage import Reader, Request


def dump_holdings(holdings: Iterable[Holding]) -> list[Any]:
    """Holdings as JSON data."""
    return [
        [
            one.item,
            list(one.shape),
            [one.placement.dim, one.placement.blocks, one.placement.run]
            if isinstance(one.placement, Shard)
            else None,
            one.size,
        ]
        for one in dict.fromkeys(holdings)
    ]


def parse_holdings(content: Iterable[Any]) -> dict[str, list[Holding]]:
    """How each item of a checkpoint is held; several ways where several meshes have it."""
    found: dict[str, list[Holding]] = defaultdict(list)
    for item, shape, cut, size in content:
        placement = Replicate() if cut is None else Shard(*cut)
        found[item].append(Holding(item, tuple(shape), placement, size))
    return found


def fill(pieces: Sequence[Piece], reader: Reader, holdings: Mapping[str, list[Holding]]) -> None:
    """Read what a rank holds; what is cut in another way, one item at a time.

    Args:
        pieces: What is filled.
        reader: Of the checkpoint.
        holdings: How the checkpoint holds each item.

    Raises:
        InputError: If the checkpoint lacks an item, or it has another shape there.
    """
    direct, others = [], []
    for piece in pieces:
        ways = _ways(piece, holdings)
        if piece.holding in ways:
            direct.append(Request(piece.key, piece.start, piece.tensor))
        else:
            others.append((piece, ways[0]))
    reader.read(direct)
    for piece, way in others:
        whole = whole_item(reader, way)
        own = piece.holding
        local = shard_parameter(whole, own.placement, piece.rank, own.size)
        piece.tensor.copy_(local.view(-1)[piece.start : piece.stop])


def whole_item(reader: Reader, holding: Holding) -> torch.Tensor:
    """All of an item."""
    count = holding.size if isinstance(holding.placement, Shard) else 1
    parts = [
        torch.empty(holding.length, dtype=reader.dtype(holding.key(rank))) for rank in range(count)
    ]
    reader.read(Request(holding.key(rank), 0, part) for rank, part in enumerate(parts))
    return unshard([part.view(holding.local_shape) for part in parts], holding.placement)


def _ways(piece: Piece, holdings: Mapping[str, list[Holding]]) -> list[Holding]:
    item = piece.holding.item
    ways = holdings.get(item, [])
    if not ways:
        rule = "the checkpoint has no such state: it is of another optimizer or model"
        if "#" in item:
            rule = "the state summarizes a shard, so it needs the same tp layout as before"
        raise InputError("resume", item, rule)
    if ways[0].shape != piece.holding.shape:
        raise InputError("resume", piece.holding.shape, f"{item} has another shape", ways[0].shape)
    return ways


def read_items(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Every item of a checkpoint as a whole, one after the other."""
    reader = Reader(folder)
    for item, ways in sorted(parse_holdings(read_manifest(folder)["holdings"]).items()):
        yield item, whole_item(reader, ways[0])
