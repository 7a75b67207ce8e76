"""Families of synthetic op graphs: the shapes that models come in.

Each family turns a generator and a target number of parameters into an `OpGraph`. The families
of `TRAIN_FAMILIES` are trained on; those of `HELD_OUT_FAMILIES` never are.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from rlplace.envs.blocks import (
    Block,
    attention,
    convolution,
    embedding,
    experts,
    head,
    mlp,
)
from rlplace.graph.types import Affine, Edge, Group, OpGraph, Structure

_VOCABULARIES = (8192, 30528, 32000, 50304, 128256, 151936)


@dataclass
class _Chain:
    """Blocks in order, with the edges that skip."""

    blocks: list[Block] = field(default_factory=list)
    skips: list[tuple[int, int]] = field(default_factory=list)
    breaks: set[int] = field(default_factory=set)

    def add(self, *blocks: Block) -> int:
        """Append blocks; the index of the last one."""
        self.blocks.extend(blocks)
        return len(self.blocks) - 1

    def graph(self, name: str, seq: int, tied: bool = False) -> OpGraph:
        """The op graph; `tied` shares the table of the first group with the last."""
        structures: dict[str, int] = {}
        distinct: list[Structure] = []
        groups = []
        last = len(self.blocks) - 1
        for index, block in enumerate(self.blocks):
            if block.structure.hash not in structures:
                structures[block.structure.hash] = len(distinct)
                distinct.append(block.structure)
            params = ("embedding.weight",) if tied and index in (0, last) else ()
            number = structures[block.structure.hash]
            groups.append(Group(index, f"{block.name}.{index}", number, params=params))
        links = [(i, i + 1) for i in range(last) if i + 1 not in self.breaks] + self.skips
        edges = tuple(
            Edge(src, dst, f"t{src}", Affine(0.0, self.blocks[src].output))
            for src, dst in sorted(links)
        )
        size = self.blocks[0].structure.work.params
        return OpGraph(
            name,
            tuple(groups),
            edges,
            tuple(distinct),
            tokens_per_sample=seq,
            tied=(("embedding.weight", size),) if tied else (),
        )


def transformer(rng: np.random.Generator, params: float) -> OpGraph:
    """Embedding, layers of attention and MLP, head; one group a layer half."""
    shape = _shape(rng, params)
    chain = _Chain([embedding(shape.seq, shape.hidden, shape.vocab)])
    for _ in range(shape.layers):
        chain.add(shape.attention(), shape.mlp())
    chain.add(head(shape.seq, shape.hidden, shape.vocab))
    return chain.graph("transformer", shape.seq, tied=bool(rng.random() < 0.3))


def encoder_decoder(rng: np.random.Generator, params: float) -> OpGraph:
    """Two stacks; every decoder layer reads the encoder's last output."""
    shape = _shape(rng, params, floor=4)
    source = _power_of_two(rng, max(64, shape.seq // 4), shape.seq * 2)
    chain = _Chain([embedding(source, shape.hidden, shape.vocab)])
    encoders = max(1, shape.layers * int(rng.integers(3, 6)) // 9)
    for _ in range(encoders):
        chain.add(shape.attention(source), shape.mlp(source))
    memory = len(chain.blocks) - 1
    chain.breaks.add(chain.add(embedding(shape.seq, shape.hidden, shape.vocab)))
    for _ in range(max(1, shape.layers - encoders)):
        cross = attention(shape.seq, shape.hidden, shape.heads, shape.heads, memory_len=source)
        chain.add(shape.attention())
        chain.skips.append((memory, chain.add(cross)))
        chain.add(shape.mlp())
    chain.add(head(shape.seq, shape.hidden, shape.vocab))
    return chain.graph("encoder-decoder", shape.seq)


def mixture(rng: np.random.Generator, params: float) -> OpGraph:
    """A transformer whose MLPs are mixtures of experts, all of them or every second."""
    count = int(rng.choice((4, 8, 16)))
    shape = _shape(rng, params / count * 1.5)
    every = int(rng.choice((1, 2)))
    chain = _Chain([embedding(shape.seq, shape.hidden, shape.vocab)])
    for layer in range(shape.layers):
        mixed = experts(shape.seq, shape.hidden, shape.inner, count, int(min(2, count)))
        chain.add(shape.attention(), mixed if layer % every == 0 else shape.mlp())
    chain.add(head(shape.seq, shape.hidden, shape.vocab))
    return chain.graph("mixture", shape.seq)


def convolutional(rng: np.random.Generator, params: float) -> OpGraph:
    """Four stages of convolutions: activations shrink, parameters grow."""
    depth = int(rng.integers(2, 12))
    wide = bool(rng.random() < 0.3)
    weight = (18 if wide else 1.1) * depth * (1 + 4 + 16 + 64)
    width = max(32, _round(math.sqrt(min(params, 3e9) / weight), 16))
    side = int(rng.choice((28, 56, 112)))
    chain = _Chain([convolution(side * side * 4, 3, side * side, width, True)])
    for level in range(4):
        out = width * 2**level
        before = (side * 2 // 2**level) ** 2 if level else side * side
        after = max(1, side // 2**level) ** 2
        for block in range(depth):
            first = level > 0 and block == 0
            inputs = (before, out // 2) if first else (after, out)
            chain.add(convolution(*inputs, after, out, wide))
    chain.add(head(1, width * 8, 1000))
    return chain.graph("convolutional", 1)


def irregular(rng: np.random.Generator, params: float) -> OpGraph:
    """Groups whose FLOPs, parameters and activations have nothing to do with each other."""
    count = int(rng.integers(4, 64))
    shares = rng.dirichlet(np.full(count, 0.5))
    seq = _power_of_two(rng, 128, 4096)
    hidden = _round(float(np.exp(rng.uniform(math.log(256), math.log(8192)))), 64)
    chain = _Chain()
    for share in shares:
        inner = max(64, _round(params * share / (2 * hidden), 64))
        tokens = max(1, int(seq * np.exp(rng.normal(0.0, 0.8))))
        chain.add(mlp(tokens, hidden, inner, gated=bool(rng.random() < 0.5)))
    for src in range(count - 2):
        if rng.random() < 0.1:
            chain.skips.append((src, int(rng.integers(src + 2, count))))
    return chain.graph("irregular", seq)


def hourglass(rng: np.random.Generator, params: float) -> OpGraph:
    """Convolutions down and up again, with skips between equal resolutions (U-Net)."""
    depth, levels = int(rng.integers(1, 5)), int(rng.integers(3, 6))
    width = max(32, _round(math.sqrt(min(params, 4e9) / (36 * depth * 4 ** (levels - 1))), 16))
    side = int(rng.choice((32, 64, 96)))
    chain = _Chain([convolution(side * side, 4, side * side, width, True)])
    ends: list[int] = []
    for level in [*range(levels), *reversed(range(levels - 1))]:
        pixels, out = max(1, side // 2**level) ** 2, width * 2**level
        first = len(chain.blocks)
        for _ in range(depth):
            chain.add(convolution(pixels, out, pixels, out, True))
        if len(ends) < levels:
            ends.append(len(chain.blocks) - 1)
        elif ends[level] + 1 < first:
            chain.skips.append((ends[level], first))
    return chain.graph("hourglass", 1)


def funnel(rng: np.random.Generator, params: float) -> OpGraph:
    """A transformer that halves its sequence and doubles its width twice (hierarchical)."""
    shape = _shape(rng, params / 4, floor=3)
    third = max(1, shape.layers // 3)
    chain = _Chain([embedding(shape.seq, shape.hidden, shape.vocab)])
    for level in range(3):
        seq, hidden = max(16, shape.seq // 4**level), shape.hidden * 2**level
        for _ in range(third):
            chain.add(attention(seq, hidden, shape.heads, shape.heads))
            chain.add(mlp(seq, hidden, 4 * hidden, gated=False))
    chain.add(head(max(16, shape.seq // 16), shape.hidden * 4, 1024))
    return chain.graph("funnel", shape.seq)


def towers(rng: np.random.Generator, params: float) -> OpGraph:
    """Two encoders of different shape that meet in a joint stack (image and text)."""
    chain = _Chain()
    shapes = [_shape(rng, params * share, floor=2) for share in (0.3, 0.5)]
    joint = shapes[1]
    ends = []
    for index, shape in enumerate(shapes):
        table = chain.add(embedding(shape.seq, shape.hidden, shape.vocab))
        if index:
            chain.breaks.add(table)
        for _ in range(shape.layers):
            chain.add(shape.attention(), shape.mlp())
        ends.append(len(chain.blocks) - 1)
    meeting = chain.add(joint.attention())
    chain.skips.append((ends[0], meeting))
    for _ in range(max(1, joint.layers // 2)):
        chain.add(joint.mlp(), joint.attention())
    chain.add(head(joint.seq, joint.hidden, joint.vocab))
    return chain.graph("towers", joint.seq)


Family = Callable[[np.random.Generator, float], OpGraph]

TRAIN_FAMILIES: dict[str, Family] = {
    "transformer": transformer,
    "encoder-decoder": encoder_decoder,
    "mixture": mixture,
    "convolutional": convolutional,
    "irregular": irregular,
}

HELD_OUT_FAMILIES: dict[str, Family] = {
    "hourglass": hourglass,
    "funnel": funnel,
    "towers": towers,
}


@dataclass(frozen=True)
class _Shape:
    """A transformer's dimensions."""

    seq: int
    hidden: int
    heads: int
    kv_heads: int
    inner: int
    layers: int
    vocab: int
    gated: bool

    def attention(self, seq: int | None = None) -> Block:
        return attention(seq or self.seq, self.hidden, self.heads, self.kv_heads)

    def mlp(self, seq: int | None = None) -> Block:
        return mlp(seq or self.seq, self.hidden, self.inner, self.gated)


def _shape(rng: np.random.Generator, params: float, floor: int = 1) -> _Shape:
    """Dimensions that together hold about `params` parameters, with usual proportions."""
    gated = bool(rng.random() < 0.6)
    aspect = float(np.exp(rng.uniform(math.log(40), math.log(160))))
    hidden = (max(params, 1e6) * aspect / 12.0) ** (1.0 / 3.0)
    size = 64 if hidden < 1536 else 128
    heads = max(2, _round(hidden / size, 8 if hidden / size > 12 else 2))
    hidden_dim = heads * size
    inner = _round(hidden_dim * (8.0 / 3.0 if gated else 4.0), 128)
    kv_heads = heads // 4 if gated and heads % 4 == 0 and rng.random() < 0.5 else heads
    body = (2 + 2 * kv_heads / heads) * hidden_dim**2 + (3 if gated else 2) * hidden_dim * inner
    vocab = int(rng.choice(_VOCABULARIES))
    if vocab * hidden_dim * 2 > 0.7 * params:
        vocab = 8192
    layers = int(np.clip(round((params - 2 * vocab * hidden_dim) / body), max(1, floor), 96))
    seq = _power_of_two(rng, 128, 8192)
    return _Shape(seq, hidden_dim, heads, kv_heads, inner, layers, vocab, gated)


def _power_of_two(rng: np.random.Generator, low: int, high: int) -> int:
    return int(2 ** rng.integers(int(math.log2(low)), int(math.log2(high)) + 1))


def _round(value: float, multiple: int) -> int:
    return max(multiple, round(value / multiple) * multiple)
