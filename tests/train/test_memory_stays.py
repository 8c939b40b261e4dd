"""A run under fsdp2 keeps no memory from step to step: what the C library has given out and not got back is counted.

The peak that a process reports on a CPU (`memory_kind: resident_peak`) rises for some hundred steps, because the C
library keeps what it was given back in pieces. What is in use rises only until torch's flight recorder is full.
"""

import ctypes
import gc
from pathlib import Path
from typing import Any

import pytest
import torch

from plait.contract.observer import RunObserver
from plait.host import check, compose
from plait.records.run_folder import RunFolder
from plait_testing import whole_run

STEPS, EVERY, SETTLED = 260, 10, 200  # steps; between two looks; until the flight recorder has its 2,000 collectives
KEPT = 1024  # bytes that a step may keep at most; 4 MiB were suspected
PLANTED = 1024  # elements, of 4 bytes
EIGHT = ("train.seq_len=32", "train.local_batch_size=8", "train.global_batch_size=16")  # rows of a rank


class MallInfo(ctypes.Structure):
    """glibc's `struct mallinfo2`."""

    _fields_ = [(name, ctypes.c_size_t) for name in (*"abcd", "hblkhd", *"fg", "uordblks", *"ij")]  # two are read


def in_use() -> int:
    """Bytes that all threads of this process have from `malloc` now, tensors among them."""
    read: Any = ctypes.CDLL(None).mallinfo2
    read.restype = MallInfo
    found = read()
    return int(found.uordblks + found.hblkhd)


class InUse(RunObserver):
    """Bytes in use after steps. keeps: whether each step keeps a small tensor, as a leak would."""

    def __init__(self, keeps: bool) -> None:
        self.keeps, self.kept, self.bytes = keeps, list[Any](), dict[int, int]()

    def end(self, step: int) -> None:
        if self.keeps:
            self.kept.append(torch.ones(PLANTED))
        if step % EVERY == 0:
            gc.collect()
            self.bytes[step] = in_use()


def bytes_in_use(config: Any, folder: Any, keeps: bool) -> dict[int, int]:
    from plait.train.trainer import Trainer

    watched = InUse(keeps)
    trainer = Trainer(config, RunFolder(folder), lambda line: None, [watched])
    trainer.restore()
    assert trainer.fit() == "finished"
    return watched.bytes


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="glibc 2.33 or later counts what is in use")
@pytest.mark.parametrize("keeps", [False, True])
def test_no_step_keeps_memory(keeps: bool, plait_ranks: Any, tmp_path: Path) -> None:
    """With `keeps` the leak is seen."""
    more = (*EIGHT, f"train.steps={STEPS}", "validation.interval=0", "checkpoint.enabled=false")
    config = check(compose(whole_run.overrides({"fsdp2": {}}, tmp_path, 2, *more)), 2).config
    (tmp_path / "versions.json").write_text("{}")
    for counted in plait_ranks.run(bytes_in_use, config, tmp_path, keeps, world=2):
        settled = [each for step, each in counted.items() if step >= SETTLED]
        middle = len(settled) // 2  # the least of each half: gloo's threads free a moment later
        grown = (min(settled[middle:]) - min(settled[:middle])) / (middle * EVERY)
        assert (grown > KEPT) == keeps, f"each step keeps {grown:,.0f} bytes: {counted}"
