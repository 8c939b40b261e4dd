"""What `plait train` says of a run at its start: its model, its numbers, its devices and its data."""

import math
from collections.abc import Mapping
from typing import Any

from plait.check.checked import Checked
from plait.contract.config import accumulation


def introduced(checked: Checked) -> list[str]:
    """Its lines."""
    config, layout, run = checked.config, checked.layout, checked.assembly.run
    train, precision = config.train, config.precision
    added = sum(math.prod(run.shapes[fqn]) for fqn in run.added)
    of_these = f", {added:,} of them added by strategies" if added else ""
    weights = "" if precision.param == precision.storage else f" with weights in {precision.storage}"
    devices = f"{layout.world_size} x {run.device_name or run.device_type.upper()}"
    data_ranks = layout.count("batch")
    samples = accumulation(config, data_ranks) * data_ranks * train.local_batch_size
    return [
        f"model: {_named(config.model)}, {run.parameters:,} parameters{of_these}, in {precision.param}{weights}, "
        f"on {devices}",
        f"data: {_named(config.data)}, {samples * train.seq_len:,} tokens per step: "
        f"{samples} samples of {train.seq_len}",
    ]


def _named(node: Mapping[str, Any]) -> str:
    """The class of a node of the config, and the files that it reads."""
    path = node.get("path")
    return str(node["_target_"]).rpartition(".")[2] + (f" of {path}" if isinstance(path, str) else "")
