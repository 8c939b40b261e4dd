"""What `plait.planning` offers to a strategy that searches for a layout."""

from plait_plan.cluster_here import cluster_here
from plait_plan.cores import on_all_cores, processes_stay
from plait_plan.pricing.activations import activations
from plait_plan.pricing.checked import needs
from plait_plan.pricing.graph import block_graphs
from plait_plan.pricing.pieces import Pieces
from plait_plan.pricing.price import BlockCost, Price, Total, price, put_together
from plait_plan.pricing.space import Composition, compositions, offering, representatives, stage_plan
from plait_plan.pricing.stage_price import StageTotal, planned_stages, shares, stage_total
from plait_plan.pricing.traces import Family, families, made_of, traces
from plait_plan.ranks import degrees, members
from plait_plan.roofline import seconds_of, seconds_to_send
from plait_plan.telling import Telling

__all__ = [
    "BlockCost",
    "Composition",
    "Family",
    "Pieces",
    "Price",
    "StageTotal",
    "Telling",
    "Total",
    "activations",
    "block_graphs",
    "cluster_here",
    "compositions",
    "degrees",
    "families",
    "made_of",
    "members",
    "needs",
    "offering",
    "on_all_cores",
    "planned_stages",
    "price",
    "processes_stay",
    "put_together",
    "representatives",
    "seconds_of",
    "seconds_to_send",
    "shares",
    "stage_plan",
    "stage_total",
    "traces",
]
