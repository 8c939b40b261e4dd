"""The export of a run, and a copy of it at an address, beside the checkpoints there."""

from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch.distributed as dist

from plait.checkpoint.export import export_run
from plait.checkpoint.sums import SUMS
from plait.parallel.agreement import on_all_ranks

if TYPE_CHECKING:
    from plait.data.tokenizer_files import Used
    from plait.parallel.applied import Applied
    from plait.system.objects import Address


def export_and_copy(
    applied: "Applied",
    run: Path,
    checkpoints: "Path | Address",
    known: Collection[str],
    tokenizer: "Callable[[], Used | None]",
    doing: Callable[[str], None],
) -> str:
    """Export to the run's folder, and copy that beside its checkpoints if they are at an address. Called by all ranks.
    Returns where the weights are, in words. known, tokenizer: as for `export_run`. doing: gets what is done, before
    each part."""
    folder, to = run / "export", checkpoints / "export"
    doing("the export of the weights")
    export_run(applied, folder, known, tokenizer)
    if isinstance(to, Path):
        return str(folder)
    copy_export(folder, to, doing)
    return f"{folder} and {to}"


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
