"""The arithmetic of one message-passing layer, in plain torch.

It is defined once, here: `PlainConv` runs it without any graph library (importing
torch_geometric costs seconds, more than a whole plan), and
`rlplace.policies.convolution_pyg.GraphConv` runs it as a PyG layer for training.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


def segment_sum(values: Tensor, segment: Tensor, count: int) -> Tensor:
    """(count, ...): sums of the rows of `values` (M, ...) with equal `segment` (M,)."""
    return values.new_zeros(count, *values.shape[1:]).index_add(0, segment, values)


def segment_mean(values: Tensor, segment: Tensor, count: int) -> Tensor:
    """(count, ...): means of rows; zero where a segment is empty."""
    sizes = segment_sum(values.new_ones(len(values)), segment, count).clamp(min=1.0)
    return segment_sum(values, segment, count) / sizes.unsqueeze(-1)


def segment_log_softmax(logits: Tensor, segment: Tensor, count: int) -> Tensor:
    """(M,): log-softmax of `logits` (M,) over rows with equal `segment`."""
    low = logits.new_full((count,), -torch.inf)
    highest = low.scatter_reduce(0, segment, logits.detach(), "amax")
    shifted = logits - highest[segment]
    return shifted - segment_sum(shifted.exp(), segment, count).log()[segment]


def segment_softmax_mean(values: Tensor, logits: Tensor, segment: Tensor, count: int) -> Tensor:
    """(count, W): means of `values` (M, W) weighted by the softmax of `logits` (M,)."""
    weights = segment_log_softmax(logits, segment, count).exp()
    return segment_sum(values * weights.unsqueeze(-1), segment, count)


class ConvCore(nn.Module):
    r"""Messages along edges and what a node makes of them.

    .. math::
        m_{ij} = relu(A x_j + B x_i + C e_{ij}), \quad
        y_i = O [mean_j m_{ij}, \sum_j softmax_j(a \cdot m_{ij}) m_{ij}]

    The linear maps act on nodes before messages and after aggregation, so an edge costs only
    element-wise work. The weighted mean is a simple form of attention over neighbours (GATv2,
    Brody et al. 2021, https://arxiv.org/abs/2105.14491).

    Args:
        width: Width of node embeddings.
        edge_features: Columns of the edge features.
    """

    def __init__(self, width: int, edge_features: int) -> None:
        super().__init__()
        self.source = nn.Linear(width, width)
        self.target = nn.Linear(width, width, bias=False)
        self.edge = nn.Linear(edge_features, width, bias=False)
        self.logit = nn.Linear(width, 1)
        self.out = nn.Linear(2 * width, width)

    def message(self, source: Tensor, target: Tensor, edges: Tensor) -> Tensor:
        """(E, W) messages of projected ends (E, W) and edge features (E, F)."""
        return torch.relu(source + target + self.edge(edges))

    def aggregate(self, messages: Tensor, index: Tensor, count: int) -> Tensor:
        """(count, W): what arrives at each node; `index` (E,) is where each message goes."""
        mean = segment_mean(messages, index, count)
        logits = self.logit(messages).squeeze(-1)
        return torch.cat([mean, segment_softmax_mean(messages, logits, index, count)], dim=-1)


class PlainConv(nn.Module):
    """`ConvCore` by gather and `index_add`; takes and gives the same as `GraphConv`."""

    def __init__(self, width: int, edge_features: int) -> None:
        super().__init__()
        self.core = ConvCore(width, edge_features)

    def forward(self, nodes: Tensor, edge_index: Tensor, edges: Tensor) -> Tensor:
        """(N, W) of nodes (N, W), edge_index (2, E) from source to target, edges (E, F)."""
        source, target = edge_index
        projected = self.core.source(nodes)[source], self.core.target(nodes)[target]
        messages = self.core.message(*projected, edges)
        result: Tensor = self.core.out(self.core.aggregate(messages, target, len(nodes)))
        return result
