"""A copy of an exported folder at an address, beside the checkpoints there."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch.distributed as dist

from plait.checkpoint.sums import SUMS
from plait.parallel.agreement import on_all_ranks

if TYPE_CHECKING:
    from plait.system.objects import Address


def copy_export(folder: Path, to: "Address", doing: Callable[[str], None]) -> None:
    """Copy the files of `folder`, which rank 0 has, to objects below `to`, and remove what lay there. Called by all
    ranks.

    The copy is whole when its SHA256SUMS is there, which is removed first and written last.
    doing: gets what is copied, before each file, because other ranks wait for it meanwhile.
    Raises DiskError on all ranks if the store refuses, or cannot be reached for a minute.
    """
    group = dist.group.WORLD if dist.is_initialized() else None
    writes = group is None or dist.get_rank() == 0

    def together(work: Callable[[], list[str] | None]) -> list[str] | None:
        return on_all_ranks(lambda: work() if writes else None, group)[0]

    def begin() -> list[str]:
        (to / SUMS).unlink()
        to.rmtree()
        names = sorted(file.name for file in folder.iterdir())
        return sorted(names, key=lambda name: name == SUMS)

    for name in together(begin) or []:
        doing(f"the copy of {name} to {to}")
        together(partial((to / name).put, folder / name))
