"""Batches that are made of another source's, whose place in its data is theirs too."""

from collections.abc import Mapping
from typing import Any

from plait import Batches


class Around(Batches):
    """Those of `batches`, to be changed or added to by a subclass; a checkpoint keeps what it would keep of them."""

    def __init__(self, batches: Batches) -> None:
        super().__init__(batches.seq_len, batches.global_batch_size, batches.dp)
        self.rows, self.epoch, self._batches = batches.rows, batches.epoch, batches

    def state_dict(self) -> dict[str, Any]:
        return self._batches.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._batches.load_state_dict(state)

    def left_out(self) -> str:
        return self._batches.left_out()
