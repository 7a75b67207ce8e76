"""Encodes an instance, once: both graphs by message passing, then each looks at the other.

No parameter belongs to a group, a host or their number: permuting hosts permutes their
embeddings and leaves the context as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rlplace.envs.types import FloatArray, InstanceView, IntArray
from rlplace.policies.convolution import PlainConv, segment_mean, segment_softmax_mean
from rlplace.policies.types import NetConfig

#: Makes a message-passing layer from (width, edge features): `PlainConv` or PyG's `GraphConv`.
ConvFactory = Callable[[int, int], nn.Module]


@dataclass(frozen=True)
class Graphs:
    """One kind of graph of K instances, side by side.

    Args:
        nodes: (N, F).
        edge_index: (2, E), into `nodes`.
        edges: (E, EDGE_FEATURES).
        owner: (N,): the instance of each node.
        sizes: Number of nodes of each instance.
    """

    nodes: Tensor
    edge_index: Tensor
    edges: Tensor
    owner: Tensor
    sizes: tuple[int, ...]

    @staticmethod
    def join(parts: Sequence[tuple[FloatArray, IntArray, FloatArray]]) -> Graphs:
        """Graphs given as (nodes, edge_index, edges)."""
        sizes = [len(nodes) for nodes, _, _ in parts]
        first = np.cumsum([0, *sizes])
        shifted = [edges + start for (_, edges, _), start in zip(parts, first[:-1], strict=True)]
        return Graphs(
            torch.from_numpy(np.concatenate([nodes for nodes, _, _ in parts])),
            torch.from_numpy(np.concatenate(shifted, axis=1)),
            torch.from_numpy(np.concatenate([features for _, _, features in parts])),
            torch.from_numpy(np.repeat(np.arange(len(parts)), sizes)),
            tuple(sizes),
        )


@dataclass(frozen=True)
class ViewBatch:
    """K instances as tensors."""

    ops: Graphs
    hosts: Graphs
    globals: Tensor

    @staticmethod
    def join(views: Sequence[InstanceView]) -> ViewBatch:
        """A batch of distinct instances of any sizes."""
        return ViewBatch(
            Graphs.join([(v.op_features, v.op_edges, v.op_edge_features) for v in views]),
            Graphs.join(
                [(v.device_features, v.device_edges, v.device_edge_features) for v in views]
            ),
            torch.from_numpy(np.stack([view.globals for view in views])),
        )


@dataclass(frozen=True)
class Encoding:
    """K encoded instances.

    Spans are pooled by differences of prefix sums; these are kept in double precision, for
    differences of long sums lose digits.

    Args:
        groups: Prefix sums of group embeddings, each instance led by a row of zeros.
        hosts: The same of hosts.
        group_start: (K,): row of the leading zeros of each instance.
        host_start: (K,): the same of hosts.
        context: (K, W): what is known of the whole instance.
    """

    groups: Tensor
    hosts: Tensor
    group_start: Tensor
    host_start: Tensor
    context: Tensor

    @staticmethod
    def join(parts: Sequence[Encoding]) -> Encoding:
        """One encoding of all the instances, in order."""
        if len(parts) == 1:
            return parts[0]
        group_first = np.cumsum([0, *(len(part.groups) for part in parts)])[:-1]
        host_first = np.cumsum([0, *(len(part.hosts) for part in parts)])[:-1]
        return Encoding(
            torch.cat([part.groups for part in parts]),
            torch.cat([part.hosts for part in parts]),
            torch.cat([p.group_start + int(f) for p, f in zip(parts, group_first, strict=True)]),
            torch.cat([p.host_start + int(f) for p, f in zip(parts, host_first, strict=True)]),
            torch.cat([part.context for part in parts]),
        )

    def part(self, instance: int) -> Encoding:
        """The encoding of one of the instances."""
        group, host = (
            _segment(self.groups, self.group_start, instance),
            _segment(self.hosts, self.host_start, instance),
        )
        zero = self.group_start.new_zeros(1)
        return Encoding(group, host, zero, zero, self.context[instance : instance + 1])


class GraphEncoder(nn.Module):
    """Rounds of message passing with and against the edges, each with its own weights."""

    def __init__(self, features: int, config: NetConfig, conv: ConvFactory) -> None:
        super().__init__()
        width, rounds = config.width, range(config.rounds)
        self.embed = nn.Linear(features, width)
        self.along = nn.ModuleList(conv(width, config.edge_features) for _ in rounds)
        self.against = nn.ModuleList(conv(width, config.edge_features) for _ in rounds)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in rounds)

    def forward(self, graphs: Graphs) -> Tensor:
        """(N, W) node embeddings."""
        state: Tensor = torch.relu(self.embed(graphs.nodes))
        reverse = graphs.edge_index.flip(0)
        for along, against, norm in zip(self.along, self.against, self.norms, strict=True):
            heard = along(state, graphs.edge_index, graphs.edges)
            heard = heard + against(state, reverse, graphs.edges)
            state = norm(state + torch.relu(heard))
        return state


class CrossAttention(nn.Module):
    """Nodes of one graph look at all nodes of the other graph of the same instance."""

    def __init__(self, config: NetConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.query = nn.Linear(config.width, config.width)
        self.key = nn.Linear(config.width, config.width)
        self.value = nn.Linear(config.width, config.width)
        self.out = nn.Linear(config.width, config.width)
        self.norm = nn.LayerNorm(config.width)

    def forward(self, state: Tensor, graphs: Graphs, other: Tensor, others: Graphs) -> Tensor:
        """(N, W) of `state` (N, W), the nodes of `graphs`, looking at `other` (M, W)."""
        legal, _ = _padded(others.owner.new_ones(len(other), 1, dtype=torch.bool), others)
        query, place = _padded(self.query(state), graphs)
        key, _ = _padded(self.key(other), others)
        value, _ = _padded(self.value(other), others)
        seen = F.scaled_dot_product_attention(
            self._split(query), self._split(key), self._split(value), legal.mT.unsqueeze(1)
        )
        merged = seen.transpose(1, 2).flatten(2).flatten(0, 1)[place]
        result: Tensor = self.norm(state + self.out(merged))
        return result

    def _split(self, padded: Tensor) -> Tensor:
        """(K, heads, N, W / heads) of (K, N, W)."""
        return padded.reshape(*padded.shape[:2], self.heads, -1).transpose(1, 2)


class Encoder(nn.Module):
    """Instances to encodings; see the module's docstring.

    Args:
        config: Widths.
        conv: The message-passing layer; parameters are the same for every factory.
    """

    def __init__(self, config: NetConfig, conv: ConvFactory = PlainConv) -> None:
        super().__init__()
        width = config.width
        self.ops = GraphEncoder(config.op_features, config, conv)
        self.hosts = GraphEncoder(config.device_features, config, conv)
        self.ops_see_hosts = CrossAttention(config)
        self.hosts_see_ops = CrossAttention(config)
        self.op_logit = nn.Linear(width, 1)
        self.host_logit = nn.Linear(width, 1)
        self.globals = nn.Linear(config.global_features, width)
        self.context = nn.Linear(5 * width, width)

    def forward(self, batch: ViewBatch) -> Encoding:
        """Encode a batch of distinct instances."""
        alone_ops, alone_hosts = self.ops(batch.ops), self.hosts(batch.hosts)
        ops = self.ops_see_hosts(alone_ops, batch.ops, alone_hosts, batch.hosts)
        hosts = self.hosts_see_ops(alone_hosts, batch.hosts, alone_ops, batch.ops)
        pooled = [torch.relu(self.globals(batch.globals))]
        for state, graphs, logit in (
            (ops, batch.ops, self.op_logit),
            (hosts, batch.hosts, self.host_logit),
        ):
            count = len(graphs.sizes)
            pooled.append(segment_mean(state, graphs.owner, count))
            weights = logit(state).squeeze(-1)
            pooled.append(segment_softmax_mean(state, weights, graphs.owner, count))
        context = torch.relu(self.context(torch.cat(pooled, dim=-1)))
        groups, group_start = _prefix_sums(ops, batch.ops)
        host_sums, host_start = _prefix_sums(hosts, batch.hosts)
        return Encoding(groups, host_sums, group_start, host_start, context)


def _padded(values: Tensor, graphs: Graphs) -> tuple[Tensor, Tensor]:
    """Nodes (N, W) as (K, longest, W), zero where short, and where each node went (N,)."""
    longest = max(graphs.sizes)
    first = torch.tensor([0, *graphs.sizes[:-1]]).cumsum(0)
    place = torch.arange(len(values)) - first[graphs.owner] + graphs.owner * longest
    flat = values.new_zeros(len(graphs.sizes) * longest, values.shape[-1])
    filled = flat.index_copy(0, place, values)
    return filled.reshape(-1, longest, values.shape[-1]), place


def _prefix_sums(state: Tensor, graphs: Graphs) -> tuple[Tensor, Tensor]:
    """Prefix sums with a row before each instance, and the places of these rows (K,)."""
    place = torch.arange(len(state)) + graphs.owner + 1
    rows = state.new_zeros(len(state) + len(graphs.sizes), state.shape[-1], dtype=torch.float64)
    sums = rows.index_copy(0, place, state.double()).cumsum(0)
    start = torch.tensor([0, *(size + 1 for size in graphs.sizes[:-1])]).cumsum(0)
    return sums, start


def _segment(sums: Tensor, start: Tensor, instance: int) -> Tensor:
    stop = int(start[instance + 1]) if instance + 1 < len(start) else len(sums)
    return sums[int(start[instance]) : stop]
