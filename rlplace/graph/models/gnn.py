"""Graph neural networks of PyTorch Geometric on a batch of graphs, node by node classified.

A batch (batch, nodes, ...) becomes one block-diagonal graph, as PyG's own `Batch` makes it: the
nodes are laid one after another, and the edges of each graph are moved by the nodes before it.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rlplace.graph.models.shapes import Gcn


class GraphLoss(nn.Module):
    """Layers of graph convolution or graph attention, and the cross entropy over all nodes."""

    def __init__(self, shape: Gcn) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_layer(shape, index) for index in range(shape.layers))
        norms = shape.layers - 1 if shape.batch_norm else 0
        self.norms = nn.ModuleList(nn.BatchNorm1d(shape.hidden) for _ in range(norms))
        self.activation = nn.ELU() if shape.attention else nn.ReLU()
        self.dropout = nn.Dropout(shape.dropout)

    def forward(self, features: Tensor, edges: Tensor, labels: Tensor) -> Tensor:
        """Loss of node features (batch, nodes, features), edges and labels (batch, nodes).

        `edges` (batch, edges, 2) holds source and target of each edge; there must be no
        self-loops, for one is added at every node.
        """
        graphs, nodes = labels.shape
        first = torch.arange(graphs, device=edges.device) * nodes
        pairs = (edges + first[:, None, None]).flatten(0, 1).t()
        loops = torch.arange(graphs * nodes, device=edges.device).expand(2, -1)
        index = torch.cat([pairs, loops], dim=1)
        x = features.flatten(0, 1)
        for number, layer in enumerate(self.layers):
            x = layer(x, index)
            if number < len(self.layers) - 1:
                x = self.norms[number](x) if self.norms else x
                x = self.dropout(self.activation(x))
        return F.cross_entropy(x, labels.flatten())


def _layer(shape: Gcn, index: int) -> nn.Module:
    # Here, for the import takes seconds.
    from torch_geometric.nn import GATConv, GCNConv

    last = index == shape.layers - 1
    wide = shape.hidden if index else shape.features
    out = shape.classes if last else shape.hidden
    layer: nn.Module
    if shape.attention:
        heads = 1 if last else shape.heads
        layer = GATConv(wide, out // heads, heads, dropout=shape.dropout, add_self_loops=False)
    else:
        layer = GCNConv(wide, out, add_self_loops=False)
    return layer
