"""Curves of a run for TensorBoard."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs

from plait.host import numbers, writing


@attrs.define
class TensorBoard:
    """Curves in <run>/tensorboard."""

    _folder: Path = attrs.field(init=False)
    _writer: Any = attrs.field(init=False)

    def open(self, folder: Path, config: Mapping[str, Any], step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._folder = folder / "tensorboard"
        with writing(self._folder, "the curves for TensorBoard"):
            self._writer = SummaryWriter(str(self._folder), purge_step=step + 1, flush_secs=10)

    def log(self, row: Mapping[str, Any]) -> None:
        """Raises DiskError, a few steps late, if the writer's thread met one."""
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=key, simple_value=value) for key, value in numbers(row).items()]
        with writing(self._folder, "the curves for TensorBoard"):
            self._writer.file_writer.add_summary(Summary(value=values), row["step"])

    def close(self) -> None:
        with writing(self._folder, "the curves for TensorBoard"):
            self._writer.close()
