"""One rank of `rlplace.cluster.discover`: measures with all others busy, prints JSON.

Run as ``python -m rlplace.cluster.bench_worker`` with the variables of ``env://`` set.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from datetime import timedelta
from itertools import cycle

import psutil
import torch
import torch.distributed as dist
import torch.nn.functional as F

from rlplace.cluster.figures import RankFigures
from rlplace.cluster.types import CollectiveKind

COLLECTIVE_TIMEOUT = timedelta(seconds=30)

#: (tokens, inputs, outputs) of linear layers of small transformers, 17 MFLOP to 4.3 GFLOP.
MATMULS = (
    (128, 128, 512),
    (256, 256, 1024),
    (512, 512, 512),
    (512, 512, 2048),
    (1024, 512, 2048),
    (1024, 1024, 2048),
)

#: (samples, channels in and out, side of the kernel, side of the image) of a small ResNet.
CONVOLUTIONS = (
    (8, 64, 64, 3, 32),
    (8, 64, 256, 1, 32),
    (8, 256, 128, 1, 16),
    (8, 128, 128, 3, 16),
    (8, 512, 256, 1, 8),
    (8, 256, 256, 3, 8),
)

#: Samples, heads, tokens and width of a head of flash attention.
ATTENTION = (4, 8, 128, 64)

#: Of its backward, matmuls over those of the forward: it computes the scores again (Dao, arXiv
#: 2307.08691).
ATTENTION_BACKWARD = 2.5

#: Bytes of whole tensors; two of them beyond the caches, where large gradients are.
MESSAGES = (4 << 10, 128 << 10, 1 << 20, 4 << 20, 16 << 20)

#: Memory-bound ops run on `STREAM_BUFFERS` tensors in turn: each of the size of an activation,
#: together larger than a cache.
STREAM_SHAPE = (4096, 512)
STREAM_BUFFERS = 12

#: Shapes of the parameters of an optimizer; together larger than a cache, as those of a model.
UPDATED = ((2048, 512),) * 8

#: Shares of the time that are spent on each part.
MATMUL_SHARE, STREAM_SHARE, LAUNCH_SHARE, COLLECTIVE_SHARE = 0.25, 0.1, 0.05, 0.4
CONVOLUTION_SHARE, ATTENTION_SHARE, UPDATE_SHARE = 0.1, 0.05, 0.05


def main() -> None:
    """Measure and print one `RankFigures` as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--core", type=int, required=True, help="core to pin to")
    parser.add_argument("--budget", type=float, required=True, help="seconds to measure for")
    arguments = parser.parse_args()
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {arguments.core})
    torch.set_num_threads(1)
    with process_group():
        figures = measure(arguments.budget)
    print(json.dumps(asdict(figures)))


@contextmanager
def process_group() -> Iterator[None]:
    """The gloo group of all ranks."""
    dist.init_process_group("gloo", timeout=COLLECTIVE_TIMEOUT)
    try:
        yield
    finally:
        dist.destroy_process_group()


def measure(budget: float) -> RankFigures:
    """Everything, in about `budget` seconds."""
    resident = psutil.Process().memory_info().rss
    return RankFigures(
        matmuls=measure_matmuls(budget * MATMUL_SHARE),
        streams=measure_streams(budget * STREAM_SHARE),
        launch=measure_launch(budget * LAUNCH_SHARE),
        resident=resident,
        convolutions=measure_convolutions(budget * CONVOLUTION_SHARE),
        attention=measure_attention(budget * ATTENTION_SHARE),
        updates=measure_updates(budget * UPDATE_SHARE),
        collectives=measure_collectives(budget * COLLECTIVE_SHARE),
    )


def measure_matmuls(budget: float) -> tuple[tuple[float, float], ...]:
    """(FLOPs, seconds) of a matmul for each shape: the mean of y = xW', dx = gW and dW = g'x."""
    found = []
    for tokens, inputs, outputs in MATMULS:
        # Weights take turns, as the layers of a model do, so that they do not stay in the cache.
        weights = cycle([torch.randn(outputs, inputs) for _ in range(4)])
        x, g = torch.randn(tokens, inputs), torch.randn(tokens, outputs)

        def layer(
            x: torch.Tensor = x, g: torch.Tensor = g, weights: Iterator[torch.Tensor] = weights
        ) -> None:
            weight = next(weights)
            _ = x @ weight.t(), g @ weight, g.t() @ x

        seconds = seconds_each(layer, budget / len(MATMULS)) / 3
        found.append((2.0 * tokens * inputs * outputs, seconds))
    return tuple(found)


def measure_streams(budget: float) -> tuple[tuple[float, float], ...]:
    """(bytes read and written, seconds) of an add, a gelu, a layer norm and a softmax."""
    buffers = cycle([torch.randn(STREAM_SHAPE) for _ in range(STREAM_BUFFERS)])
    size = float(torch.Size(STREAM_SHAPE).numel() * 4)
    ops: tuple[tuple[float, Callable[[], object]], ...] = (
        (3 * size, lambda: next(buffers) + next(buffers)),
        (2 * size, lambda: F.gelu(next(buffers))),
        (2 * size, lambda: F.layer_norm(next(buffers), STREAM_SHAPE[1:])),
        (2 * size, lambda: torch.softmax(next(buffers), -1)),
    )
    return tuple((moved, seconds_each(op, budget / len(ops))) for moved, op in ops)


def measure_convolutions(budget: float) -> tuple[tuple[float, float], ...]:
    """(FLOPs, seconds) of a convolution for each shape: the mean of forward and both gradients."""
    found = []
    for samples, inputs, outputs, kernel, side in CONVOLUTIONS:
        x = torch.randn(samples, inputs, side, side, requires_grad=True)
        weight = torch.randn(outputs, inputs, kernel, kernel, requires_grad=True)
        g = torch.randn(samples, outputs, side, side)

        def layer(x: torch.Tensor = x, weight: torch.Tensor = weight, g: torch.Tensor = g) -> None:
            y = F.conv2d(x, weight, padding="same")
            torch.autograd.grad(y, (x, weight), g)

        seconds = seconds_each(layer, budget / len(CONVOLUTIONS)) / 3
        found.append((2.0 * g.numel() * inputs * kernel * kernel, seconds))
    return tuple(found)


def measure_attention(budget: float) -> tuple[tuple[float, float], ...]:
    """(FLOPs, seconds) of a flash attention kernel, forward and backward."""
    q, k, v = (torch.randn(ATTENTION, requires_grad=True) for _ in range(3))
    g = torch.randn(ATTENTION)

    def attend() -> None:
        torch.autograd.grad(F.scaled_dot_product_attention(q, k, v), (q, k, v), g)

    samples, heads, tokens, width = ATTENTION
    flops = 4.0 * samples * heads * tokens * tokens * width
    return ((flops * (1.0 + ATTENTION_BACKWARD), seconds_each(attend, budget)),)


def measure_updates(budget: float) -> tuple[tuple[float, float], ...]:
    """(bytes read and written, seconds) of a step of AdamW, its two moments included."""
    params = [torch.randn(shape, requires_grad=True) for shape in UPDATED]
    for param in params:
        param.grad = torch.randn_like(param)
    optimizer = torch.optim.AdamW(params, fused=True)
    elements = sum(param.numel() for param in params)
    # Weight, gradient and moments are read; all but the gradient are written.
    return ((7 * 4.0 * elements, seconds_each(optimizer.step, budget)),)


def measure_launch(budget: float) -> float:
    """Seconds of an op on 16 elements that autograd records."""
    tensor = torch.ones(16, requires_grad=True)
    chain = 100

    def ops() -> None:
        value = tensor
        for _ in range(chain):
            value = value * tensor

    return seconds_each(ops, budget) / chain


def seconds_each(work: Callable[[], object], window: float) -> float:
    """Seconds of the core a call, the best of three windows in which all ranks do the same.

    The thread's own time is counted, not the wall's: it is that of a core at full speed however
    many ranks (or strangers) take turns on it, while caches and memory are shared as in a run.
    Memory that is touched for the first time makes some windows slower than any step is.
    """
    work()
    samples = []
    for _ in range(3):
        dist.barrier()
        calls, start, used = 0, time.perf_counter(), time.thread_time()
        while time.perf_counter() - start < window / 3 or calls == 0:
            work()
            calls += 1
        samples.append((time.thread_time() - used) / calls)
    return min(samples)


def measure_collectives(budget: float) -> tuple[tuple[CollectiveKind, int, float, float], ...]:
    """(kind, ranks, bytes of the whole tensor, seconds), all groups of a size at once."""
    world, rank = dist.get_world_size(), dist.get_rank()
    sizes = [ranks for ranks in range(2, world + 1) if world % ranks == 0]
    # Between two ranks p2p is measured even where the world does not divide into pairs.
    cases: list[tuple[CollectiveKind, int]] = [("p2p", 2)] if world > 1 else []
    kinds: tuple[CollectiveKind, ...] = ("all_reduce", "all_gather", "reduce_scatter")
    cases += [(kind, ranks) for ranks in sizes for kind in kinds]
    groups = {ranks: own_group(ranks) for ranks in sizes}
    found: list[tuple[CollectiveKind, int, float, float]] = []
    for kind, ranks in cases:
        for size in MESSAGES:
            elements = -(-size // 4 // ranks) * ranks
            whole = torch.zeros(elements)
            call = call_of(kind, whole, ranks, groups.get(ranks))
            seconds = seconds_together(call, budget / len(cases) / len(MESSAGES))
            if kind != "p2p":
                found.append((kind, ranks, 4.0 * elements, seconds))
            elif rank < world // 2 * 2:
                found.append((kind, ranks, 4.0 * elements, seconds / 2))
    return tuple(found)


def own_group(ranks: int) -> dist.ProcessGroup | None:
    """This rank's group when the world is cut into neighbours of `ranks` ranks."""
    world = range(dist.get_world_size())
    groups = [dist.new_group(list(world[start : start + ranks])) for start in world[::ranks]]
    own: dist.ProcessGroup | None = groups[dist.get_rank() // ranks]
    return own


def call_of(
    kind: CollectiveKind, whole: torch.Tensor, ranks: int, group: dist.ProcessGroup | None
) -> Callable[[], object]:
    """A call of a collective whose whole tensor is given; of p2p there and back."""
    if kind == "p2p":
        return ping_pong(whole)
    part = torch.zeros(whole.numel() // ranks)
    if kind == "all_reduce":
        return lambda: dist.all_reduce(whole, group=group)
    if kind == "all_gather":
        return lambda: dist.all_gather_into_tensor(whole, part, group=group)
    return lambda: dist.reduce_scatter_single(part, whole, group=group)


def ping_pong(message: torch.Tensor) -> Callable[[], None]:
    """A call that sends a message to the neighbour and gets one back; nothing without one."""
    rank, world = dist.get_rank(), dist.get_world_size()
    peer = rank ^ 1

    def call() -> None:
        if peer >= world:
            return
        if rank < peer:
            dist.send(message, peer)
            dist.recv(message, peer)
        else:
            dist.recv(message, peer)
            dist.send(message, peer)

    return call


def seconds_together(call: Callable[[], object], budget: float) -> float:
    """Seconds a call on the wall, every rank making the same number of calls.

    It is the lower quartile: where the machine is quiet it is the median, and where a stranger
    takes a core away for milliseconds that is not the collective's cost.
    """
    call()
    dist.barrier()
    start = time.perf_counter()
    call()
    trial = torch.tensor(time.perf_counter() - start)
    dist.all_reduce(trial, dist.ReduceOp.MAX)
    samples = []
    for _ in range(max(4, min(200, int(budget / trial.item())))):
        start = time.perf_counter()
        call()
        samples.append(time.perf_counter() - start)
    return sorted(samples)[len(samples) // 4]


if __name__ == "__main__":
    main()
