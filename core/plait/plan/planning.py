"""What `plait.planning` offers to a strategy that searches for a layout."""

from plait.contract.cluster import Cluster, cluster_here, cluster_of
from plait.contract.config import REMAT
from plait.contract.errors import near_miss
from plait.contract.model_spec import matches
from plait.parallel.build import build_model
from plait.plan.pieces import Pieces, pieces
from plait.plan.price import Price, Total, Way, price, put_together
from plait.plan.ranks import degrees, members
from plait.plan.space import Composition, compositions, offering, representatives

__all__ = [
    "REMAT",
    "Cluster",
    "Composition",
    "Pieces",
    "Price",
    "Total",
    "Way",
    "build_model",
    "cluster_here",
    "cluster_of",
    "compositions",
    "degrees",
    "matches",
    "members",
    "near_miss",
    "offering",
    "pieces",
    "price",
    "put_together",
    "representatives",
]
