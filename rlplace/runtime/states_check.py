"""Our ZeRO against torch's own `fully_shard`, on gloo ranks of this machine.

A small network goes through the reducer and its lender as a stage does, with some levels, and
through `fully_shard`; both are clipped and stepped by AdamW with a weight decay of its own for
biases. The last rank has no samples in the last micro-batch: ours does what `Reducer.idle_forward`
and `idle_backward` say, torch's computes with a weight of zero.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Sequence
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.multiprocessing.spawn import spawn

from rlplace.runtime.buckets import Replicas
from rlplace.runtime.cuts import Trained
from rlplace.runtime.fragments import make_states
from rlplace.runtime.lending import Lender
from rlplace.runtime.reduce import Reducer

_SIZES = (5, 7, 7, 3)
_STEPS, _MICRO_BATCHES, _ROWS, _CLIP = 3, 2, 4, 0.02


def deviations(levels: Sequence[Sequence[int]], ranks: int, timeout: float) -> list[float]:
    """Largest difference of a weight after some steps, or of the gradients' norm.

    Args:
        levels: For each run, the ZeRO level of each of the three layers.
        ranks: Number of ranks, over which states are sharded.
        timeout: Seconds that a rank waits for another.
    """
    with tempfile.TemporaryDirectory(prefix=f"rlplace-states-{os.getpid()}-") as folder:
        arguments = (ranks, folder, timeout, [tuple(own) for own in levels])
        spawn(_run_rank, arguments, ranks)  # type: ignore[no-untyped-call]  # torch has no types
        found: list[float] = torch.load(Path(folder) / "found")
    return found


def _run_rank(
    rank: int, ranks: int, folder: str, timeout: float, levels: Sequence[Sequence[int]]
) -> None:
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    limit = timedelta(seconds=timeout)
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", store, limit, ranks, rank)
    try:
        weights, norms = _with_torch()
        found = []
        for own in levels:
            mine, mine_norms = _with_ours(own)
            pairs = [*zip(mine, weights, strict=True), *zip(mine_norms, norms, strict=True)]
            found.append(max(float((a - b).abs().max()) for a, b in pairs))
        if rank == 0:
            torch.save(found, Path(folder) / "found")
        dist.barrier()
    finally:
        dist.destroy_process_group()


def _layers() -> list[nn.Linear]:
    torch.manual_seed(0)
    pairs = pairwise(_SIZES)
    return [nn.Linear(size, to, dtype=torch.float64) for size, to in pairs]


def _micro_batches(step: int) -> Iterator[tuple[Tensor, bool]]:
    """This rank's samples, and whether it has any."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(100 * step + rank)
    for index in range(_MICRO_BATCHES):
        samples = torch.randn(_ROWS, _SIZES[0], dtype=torch.float64)
        yield samples, index + 1 < _MICRO_BATCHES or rank + 1 < ranks


def _settings(name: str) -> dict[str, Any]:
    return {"weight_decay": 0.0} if name == "bias" else {"weight_decay": 0.1}


def _with_torch() -> tuple[list[Tensor], list[Tensor]]:
    layers, ranks = _layers(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (ranks,))
    for layer in layers:
        fully_shard(layer, mesh=mesh)
    named = [pair for layer in layers for pair in layer.named_parameters()]
    groups = [{"params": [param], **_settings(name)} for name, param in named]
    optimizer, norms = torch.optim.AdamW(groups, lr=0.01), []
    for step in range(_STEPS):
        optimizer.zero_grad()
        for samples, has in _micro_batches(step):
            values = samples
            for layer in layers:
                values = torch.tanh(layer(values))
            # It averages over the ranks.
            torch.autograd.backward(values.square().sum() * (ranks if has else 0.0))
        norm = torch.nn.utils.clip_grad_norm_([param for _, param in named], _CLIP)
        norms.append(norm.full_tensor())  # type: ignore[attr-defined]  # it is a DTensor
        optimizer.step()
    return [param.full_tensor().detach() for _, param in named], norms  # type: ignore[attr-defined]  # these too


def _with_ours(levels: Sequence[int]) -> tuple[list[Tensor], list[Tensor]]:
    layers, world = _layers(), dist.group.WORLD
    named = [
        (name, param, index)
        for index, layer in enumerate(layers)
        for name, param in layer.named_parameters()
    ]
    params = [param for _, param, _ in named]
    trained = [
        Trained(param, ((0, index),), levels[index], settings=tuple(_settings(name).items()))
        for name, param, index in reversed(named)
    ]
    reducer = Reducer(
        trained,
        Replicas(world, world, None, dist.new_group(), dist.new_group()),
        steps={0: len(layers)},
        everyone=world,
        bucket_bytes=200,
    )
    optimizer, norms = torch.optim.AdamW(reducer.param_groups, lr=0.01), []
    make_states(optimizer)
    for step in range(_STEPS):
        reducer.start()
        for index, (samples, has) in enumerate(_micro_batches(step)):
            final = set(map(id, params)) if index + 1 == _MICRO_BATCHES else set()
            if not has:
                reducer.idle_forward(0)
                reducer.idle_backward(0, final)
                continue
            loss = _forward(layers, reducer.lenders[0], samples)
            with reducer.backward(0, final):
                torch.autograd.backward(loss)
        reducer.finish()
        norms.append(torch.tensor(reducer.clip(_CLIP), dtype=torch.float64))
        reducer.update(optimizer)
    _rewrite(reducer)
    reducer.complete()
    return [param.detach().clone() for param in params], norms


def _forward(layers: Sequence[nn.Linear], lender: Lender, samples: Tensor) -> Tensor:
    values = {"x": samples}
    for index, layer in enumerate(layers):
        lender.before(index)
        values["x"] = torch.tanh(layer(values["x"]))
        lender.after(index, values, ("x",))
    return values["x"].square().sum()


@torch.no_grad()
def _rewrite(reducer: Reducer) -> None:
    """Take all runs out, spoil what is held of the weights, and write them in, as a load does."""
    kept = [run.of(run.stepped.detach()).clone() for run in reducer.runs]
    for param in reducer.trained:
        param.zero_()
    reducer.refresh()
    for run, values in zip(reducer.runs, kept, strict=True):
        run.of(run.stepped.detach()).copy_(values)
    reducer.refresh()
