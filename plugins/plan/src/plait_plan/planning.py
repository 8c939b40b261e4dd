"""What `plait.planning` offers to a strategy that searches for a layout."""

from plait import REMAT, Cluster, matches, near_miss
from plait.host import build_model, crowded, is_crowded, simulated, text
from plait_plan.cluster_here import cluster_here
from plait_plan.cores import on_all_cores
from plait_plan.pricing.checked import needs
from plait_plan.pricing.graph import block_graphs
from plait_plan.pricing.pieces import Pieces
from plait_plan.pricing.price import BlockCost, Price, Total, price, put_together
from plait_plan.pricing.space import Composition, compositions, offering, stage_plan
from plait_plan.pricing.stage_price import StageTotal, planned_stages, shares, stage_total
from plait_plan.pricing.traces import traces
from plait_plan.ranks import degrees, members
from plait_plan.roofline import seconds_of, seconds_to_send

cluster_of = Cluster.of
size, table = text.size, text.table

__all__ = [
    "REMAT",
    "BlockCost",
    "Cluster",
    "Composition",
    "Pieces",
    "Price",
    "StageTotal",
    "Total",
    "block_graphs",
    "build_model",
    "cluster_here",
    "cluster_of",
    "compositions",
    "crowded",
    "degrees",
    "is_crowded",
    "matches",
    "members",
    "near_miss",
    "needs",
    "offering",
    "on_all_cores",
    "planned_stages",
    "price",
    "put_together",
    "seconds_of",
    "seconds_to_send",
    "shares",
    "simulated",
    "size",
    "stage_plan",
    "stage_total",
    "table",
    "traces",
]
