"""Finds the layout: which installed strategies a run uses, with which degrees, batch and recomputation.

Sources: Alpa (Zheng et al., arXiv 2201.12023) and Mist (Zhu et al., EuroSys 2025) for the search.
"""

import attrs

from plait import PlaitError, Run, hookimpl
from plait_autoparallel.options import AutoParallelOptions


@attrs.define
class AutoParallel(AutoParallelOptions):
    """Searches, then selects and configures other strategies. `conf/strategy/autoparallel.yaml` explains the
    options."""

    # A hardware file sets none of these; a user's own value still binds the search.
    decides = ("remat.mode", "remat.blocks", "train.local_batch_size", "train.global_batch_size")

    @hookimpl
    def configure(self, run: Run) -> None:
        from plait_autoparallel.decide import decide

        decide(self, run)


__all__ = ["AutoParallel", "PlaitError"]
