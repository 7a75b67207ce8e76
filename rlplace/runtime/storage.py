"""Pieces in the files of torch.distributed.checkpoint (DCP), by planners of our own.

Every key is a 1-D tensor, so that a rank can read any run of it. What several ranks hold is
written by one of them.
"""

from __future__ import annotations

import io
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    STORAGE_TYPES,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.state_dict_saver import save

from rlplace.runtime.holdings import Holding, Piece


@dataclass(frozen=True)
class Request:
    """A run of a key that is to be read.

    Args:
        key: See `Holding.key`.
        start: First element.
        tensor: Where it goes: flat, as long as the run.
    """

    key: str
    start: int
    tensor: Tensor


def write(
    folder: Path,
    pieces: Sequence[Piece],
    group: Any,
    on_write: Callable[[], None] = lambda: None,
) -> dict[str, Holding]:
    """Write the pieces of all ranks; all ranks call this.

    Args:
        folder: On a file system that all ranks share.
        pieces: What this rank holds, in memory that nobody changes.
        group: Process group (gloo) of all ranks, which nothing else uses meanwhile.
        on_write: Called in the middle of writing; what it raises is a failed write.

    Returns:
        How every item is held, by key; on rank 0 alone.

    Raises:
        CheckpointException: With the error of each rank that failed.
    """
    planner = _SavePlanner(pieces, on_write)
    writer = FileSystemWriter(folder, overwrite=True)
    save({}, storage_writer=writer, planner=planner, process_group=group)
    return planner.holdings


class Reader:
    """Reads runs of the keys of one checkpoint; no collective.

    Args:
        folder: What `write` has written.
    """

    def __init__(self, folder: Path) -> None:
        self._reader = FileSystemReader(folder)
        metadata = self._reader.read_metadata()
        self._reader.set_up_storage_reader(metadata, is_coordinator=True)
        self._tensors = metadata.state_dict_metadata

    def dtype(self, key: str) -> torch.dtype:
        """Dtype of a key."""
        found: torch.dtype = self._entry(key).properties.dtype
        return found

    def read(self, requests: Iterable[Request]) -> None:
        """Fill tensors, which may have another dtype or device.

        Raises:
            ValueError: If a run was not written as a whole.
        """
        wanted = list(requests)
        items = [item for index, one in enumerate(wanted) for item in self._items(index, one)]
        self._reader.read_data(LoadPlan(items), _LoadPlanner(wanted)).wait()

    def _items(self, index: int, request: Request) -> Iterable[ReadItem]:
        stop, reached = request.start + request.tensor.numel(), request.start
        chunks = sorted(self._entry(request.key).chunks, key=lambda chunk: chunk.offsets[0])
        for chunk in chunks:
            begin = chunk.offsets[0]
            low, high = max(begin, reached), min(begin + chunk.sizes[0], stop)
            if low > reached or low >= high:
                continue
            yield ReadItem(
                LoadItemType.TENSOR,
                MetadataIndex(str(index)),
                torch.Size([low - request.start]),
                MetadataIndex(request.key, chunk.offsets),
                torch.Size([low - begin]),
                torch.Size([high - low]),
            )
            reached = high
        if reached < stop:
            raise ValueError(f"{request.key} lacks the elements {reached} to {stop}")

    def _entry(self, key: str) -> TensorStorageMetadata:
        entry = self._tensors[key]
        assert isinstance(entry, TensorStorageMetadata)
        return entry


class _SavePlanner(SavePlanner):
    """Plans to write each run once, on the rank with the least to write among those who hold it."""

    def __init__(self, pieces: Sequence[Piece], on_write: Callable[[], None]) -> None:
        self._pieces = {_index(piece): piece for piece in pieces}
        self._on_write = on_write
        self.holdings: dict[str, Holding] = {}

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        storage_meta: StorageMeta | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """Nothing to do: the pieces are known."""

    def create_local_plan(self) -> SavePlan:
        """All that this rank has."""
        items = [_write_item(piece) for piece in self._pieces.values()]
        return SavePlan(items, planner_data={p.key: p.holding for p in self._pieces.values()})

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Who writes what."""
        owners: dict[tuple[str, int, int], list[int]] = defaultdict(list)
        items: dict[tuple[str, int, int], WriteItem] = {}
        for rank, plan in enumerate(all_plans):
            self.holdings |= plan.planner_data
            for item in plan.items:
                assert item.tensor_data is not None
                chunk = item.tensor_data.chunk
                span = (item.index.fqn, chunk.offsets[0], chunk.sizes[0])
                owners[span].append(rank)
                items[span] = item
        load = [0] * len(all_plans)
        chosen: list[list[WriteItem]] = [[] for _ in all_plans]
        tensors: dict[str, TensorStorageMetadata] = {}
        for span in sorted(items, key=lambda span: (-span[2], span)):
            data = items[span].tensor_data
            assert data is not None
            entry = tensors.setdefault(
                span[0], TensorStorageMetadata(data.properties, data.size, [])
            )
            if _covered(span[1], span[1] + span[2], entry.chunks):
                continue  # another mesh has it too, cut in another way
            rank = min(owners[span], key=lambda rank: load[rank])
            load[rank] += items[span].tensor_storage_size() or 0
            chosen[rank].append(items[span])
            entry.chunks.append(data.chunk)
        plans = [
            replace(plan, items=own, planner_data=None)
            for plan, own in zip(all_plans, chosen, strict=True)
        ]
        known: dict[str, STORAGE_TYPES] = {**tensors}
        return plans, Metadata(known)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """The plan as the coordinator made it."""
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        """The elements of an item."""
        self._on_write()
        return self._pieces[write_item.index].tensor


class _LoadPlanner(LoadPlanner):
    """Tells the reader where each run goes."""

    def __init__(self, requests: Sequence[Request]) -> None:
        self._requests = requests

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        metadata: Metadata | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """Nothing to do: the requests are known."""

    def create_local_plan(self) -> LoadPlan:
        """Not used: `Reader` plans alone."""
        return LoadPlan([])

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """Nothing to agree on."""
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        """The plan as it is."""
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """There are tensors only."""
        raise NotImplementedError(read_item)

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        """Where an item goes."""
        tensor = self._requests[int(read_item.dest_index.fqn)].tensor
        return tensor.narrow(0, read_item.dest_offsets[0], read_item.lengths[0])

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        """It is a view of where it goes."""


def _index(piece: Piece) -> MetadataIndex:
    return MetadataIndex(piece.key, torch.Size([piece.start]))


def _write_item(piece: Piece) -> WriteItem:
    chunk = ChunkStorageMetadata(torch.Size([piece.start]), torch.Size([piece.tensor.numel()]))
    properties = TensorProperties.create_from_tensor(piece.tensor)
    data = TensorWriteData(chunk, properties, torch.Size([piece.holding.length]))
    return WriteItem(_index(piece), WriteItemType.SHARD, tensor_data=data)


def _covered(start: int, stop: int, chunks: Iterable[ChunkStorageMetadata]) -> bool:
    """Whether chunks together hold a run; an empty one always."""
    for chunk in sorted(chunks, key=lambda chunk: chunk.offsets[0]):
        if chunk.offsets[0] <= start:
            start = max(start, chunk.offsets[0] + chunk.sizes[0])
    return start >= stop
