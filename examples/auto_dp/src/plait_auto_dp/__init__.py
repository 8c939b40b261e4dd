"""Replicas if the model fits a rank, shards if it does not: picks and configures plait-ddp or plait-fsdp2."""

import attrs
from attrs.validators import gt

from plait import Run, hookimpl

BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


@attrs.define
class AutoDp:
    """Keeps a rank's parameters, gradients and AdamW state within `budget_gb`, with the least communication."""

    budget_gb: float = attrs.field(default=40.0, validator=gt(0))

    @hookimpl
    def configure(self, run: Run) -> None:
        one = run.parameters * BYTES[run.config.precision.storage] / 1e9  # the parameters, in GB
        if run.world_size == 1:
            return
        if 4 * one <= self.budget_gb:
            run.use("ddp")
        elif one + 3 * one / run.world_size <= self.budget_gb:  # whole parameters fit: they are gathered only once
            run.use("fsdp2", reshard_after_forward="never")
        else:
            run.use("fsdp2")
