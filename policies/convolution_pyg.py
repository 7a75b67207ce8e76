"""The message-passing layer as PyG runs it. Only training imports this module."""

from __future__ import annotations

from torch import Tensor
from torch_geometric.nn import MessagePassing

from rlplace.policies.convolution import ConvCore


class GraphConv(MessagePassing):  # type: ignore[misc]
    """`ConvCore` as a PyG layer: parameters and outputs are those of `PlainConv`."""

    def __init__(self, width: int, edge_features: int) -> None:
        super().__init__(aggr=None)
        self.core = ConvCore(width, edge_features)

    def forward(self, nodes: Tensor, edge_index: Tensor, edges: Tensor) -> Tensor:
        """(N, W) of nodes (N, W), edge_index (2, E) from source to target, edges (E, F)."""
        size = (len(nodes), len(nodes))
        source, target = self.core.source(nodes), self.core.target(nodes)
        arrived = self.propagate(edge_index, size=size, source=source, target=target, edges=edges)
        result: Tensor = self.core.out(arrived)
        return result

    def message(self, source_j: Tensor, target_i: Tensor, edges: Tensor) -> Tensor:
        """Messages of the ends of each edge."""
        return self.core.message(source_j, target_i, edges)

    def aggregate(self, inputs: Tensor, index: Tensor, dim_size: int) -> Tensor:
        """Messages that arrive at each node."""
        return self.core.aggregate(inputs, index, dim_size)
