"""A cost model from measured tables, with a reader for each public form."""

from rlplace.cost.profiled.aceso import read_aceso, read_aceso_curves
from rlplace.cost.profiled.cost import ProfiledCost
from rlplace.cost.profiled.galvatron import read_galvatron, read_galvatron_curves
from rlplace.cost.profiled.graph import profile_graph
from rlplace.cost.profiled.network import BandwidthFit, ClusterNetwork, FittedNetwork, Network
from rlplace.cost.profiled.sailor import read_sailor, read_sailor_network, sailor_cluster
from rlplace.cost.profiled.types import LayerPoint, LayerTable, Profile

__all__ = [
    "BandwidthFit",
    "ClusterNetwork",
    "FittedNetwork",
    "LayerPoint",
    "LayerTable",
    "Network",
    "Profile",
    "ProfiledCost",
    "profile_graph",
    "read_aceso",
    "read_aceso_curves",
    "read_galvatron",
    "read_galvatron_curves",
    "read_sailor",
    "read_sailor_network",
    "sailor_cluster",
]
