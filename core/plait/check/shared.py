"""Whether all machines of a run see the folders that rank 0 has prepared."""

import contextlib
import os
import secrets
import socket
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

from plait.contract.errors import PlaitError
from plait.system.disk import replace
from plait.system.sockets import one_machine

MARK = ".shared"
PATIENCE = 10.0  # seconds; a network file system may show a new file late


def mark(folders: Iterable[Path]) -> dict[str, str]:
    """Folder -> the random word that its file `.shared` now holds. On one machine: nothing."""
    if one_machine():
        return {}
    marks = {str(folder): secrets.token_hex(8) for folder in folders}
    for folder, word in marks.items():
        replace(Path(folder) / MARK, word + "\n")
    return marks


def check_shared(marks: Mapping[str, str]) -> None:
    """Raises PlaitError, the same on all ranks, if one of them does not see the `marks` of rank 0 within 10 seconds.

    Collective, unless there are none. One rank per machine looks.
    """
    if not marks:
        return
    import torch.distributed as dist

    looks = os.environ.get("LOCAL_RANK", "0") == "0"
    missing = next((folder for folder, word in marks.items() if looks and not _sees(Path(folder), word)), None)
    views: list[tuple[str, str | None]] = [("", None)] * dist.get_world_size()
    dist.all_gather_object(views, (socket.gethostname(), missing))
    if dist.get_rank() == 0:
        for folder in marks:
            with contextlib.suppress(OSError):
                os.unlink(Path(folder) / MARK)
    for host, unseen in views:
        if unseen is not None:
            key = "run.name" if unseen == next(iter(marks)) else "checkpoint.dir"
            raise PlaitError(
                f"{unseen} on {host} is not the folder that {views[0][0]} sees: the machines of a run need a shared "
                "folder for runs and checkpoint.dir; start the command there"
            ).at(key, unseen, fits="a folder that all machines share")


def _sees(folder: Path, word: str) -> bool:
    end, pause = time.monotonic() + PATIENCE, 0.01
    while True:
        with contextlib.suppress(OSError):
            os.listdir(folder)  # makes a network file system look again
            if (folder / MARK).read_text(encoding="utf-8").strip() == word:
                return True
        if time.monotonic() >= end:
            return False
        time.sleep(pause)
        pause = min(2 * pause, 0.5)
