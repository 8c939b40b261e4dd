"""A balance loss of all routers together (`plait.parallel.joined_balance`) needs a step's rows in one forward."""

from typing import Any

from plait.contract.axes import MeshLayout
from plait.contract.config import Config, accumulation
from plait.contract.errors import PlaitError
from plait.contract.router import is_joined
from plait.parallel.joined_balance import AT_ONCE


def check_joined(routers: list[Any], layout: MeshLayout, config: Config) -> None:
    """Raises PlaitError if a loss joins `routers`, and a step divides its rows or the layers."""
    if not any(map(is_joined, routers)):
        return
    if stages := [axis.name for axis in layout.dense if axis.splits == "layers" and axis.degree > 1]:
        owner = layout.owner[stages[0]]
        raise PlaitError(f"{AT_ONCE}, but {owner} divides the layers; leave it out, or set model.balance_loss=0").at(
            "strategy", owner, fits="strategies that divide no layers"
        )
    local, ranks = config.train.local_batch_size, layout.count("batch")
    if (parts := accumulation(config, ranks)) > 1:
        total = config.train.global_batch_size
        raise PlaitError(
            f"{AT_ONCE}, but train.global_batch_size={total} is computed in {parts} parts of "
            f"train.local_batch_size={local} on {ranks} data ranks; set train.global_batch_size={local * ranks}, or "
            f"train.local_batch_size={local * parts}, or model.balance_loss=0"
        ).at("train.global_batch_size", total, fits=(local * ranks,))
