"""Whether the rows of metrics.jsonl are still those that a checkpoint saw."""

import hashlib
import os
from pathlib import Path
from typing import Any

from plait.contract.errors import PlaitError


class MetricsSeal:
    """The content of the file so far, as a checkpoint stores it: [bytes, sha256]. Each byte is read once.

    It follows a growing file, written by one `MetricsFile` after its `resume`.
    """

    def __init__(self, path: Path) -> None:
        self.path, self._bytes, self._hash = path, 0, hashlib.sha256()

    def now(self) -> list[Any] | None:
        """None if there is no file."""
        try:
            with self.path.open("rb") as file:
                file.seek(self._bytes)
                while block := file.read(1 << 20):
                    self._hash.update(block)
                    self._bytes += len(block)
                os.fsync(file.fileno())  # a power cut must not lose rows that a checkpoint refers to
        except FileNotFoundError:
            return None
        return [self._bytes, self._hash.hexdigest()]


def check_seal(path: Path, seal: Any, step: int) -> None:
    """Raises PlaitError if the rows of the steps up to `step` are not those that the checkpoint of `seal` saw.

    A row may be valid but wrong: a flipped bit in a digit leaves a number. A missing file passes.
    """
    if seal is None or not path.exists():
        return
    size, expected = seal
    content = path.read_bytes()[:size]
    if hashlib.sha256(content).hexdigest() != expected:
        raise PlaitError(
            f"the rows of {path} up to step {step} were changed after they were written (sha256 differs): restore "
            "them, or move the file away if the run may continue without its rows"
        )
