"""Checkpoints at an address, such as `s3://bucket/run`: an object store knows no folders and cannot rename.

A checkpoint is whole when its manifest is there, which is written last and with one PUT. Objects below `step-<n>/`
without a manifest are no checkpoint: nobody reads them, and `clean` removes them.
"""

import os
import re
import secrets
import socket
from pathlib import Path
from typing import Any, cast

from plait.checkpoint.store import MANIFEST, Manifest, Store
from plait.contract.errors import PlaitError
from plait.system.disk import place
from plait.system.errors import DiskError
from plait.system.objects import Address

WRITER = ".writer"  # which start of the run saves here; the latest one does


def open_store(folder: str | os.PathLike[str]) -> Store:
    """The checkpoints in a folder, or at an address such as `s3://bucket/run`."""
    return Store(folder) if isinstance(place(folder), Path) else AddressStore(folder)


class AddressStore(Store):
    """`address/step-<n>/`, one per checkpoint."""

    def __init__(self, folder: Any) -> None:
        super().__init__(folder)
        self._here = f"{secrets.token_hex(8)} process {os.getpid()} on {socket.gethostname()}"
        self._writes = False

    def temporary(self, step: int) -> Path:
        return self.path_of(step)

    def found(self) -> list[Path]:
        """Those with a manifest, by step."""
        return [path for path in self._steps() if (path / MANIFEST).is_file()]

    def make_room(self, step: int) -> None:
        """Remove what lies below the prefix of `step`. From now on no other start of the run may save here.

        Raises PlaitError for the checkpoint of another step, which was copied there.
        """
        self._take()
        problem = self.problem(path) if (path := self.path_of(step)) in self.found() else None
        if problem and "copied or renamed" in problem:
            raise PlaitError(f"{path} cannot be written: {problem}; move it, or remove it").at(
                "checkpoint.dir", str(self.folder)
            )
        self.remove(path)

    def commit(self, whole: Path, manifest: Manifest) -> Path:
        """Write the manifest, when all other objects are there."""
        self._take()
        sizes = {each.name: each.stat().st_size for each in whole.iterdir()}
        for name, (size, _) in manifest.files.items():
            if sizes.get(name) != size:
                raise DiskError(f"{whole} cannot be written: somebody removed or replaced its object {name}")
        try:
            cast(Address, whole / MANIFEST).create(manifest.dumps().encode())
        except FileExistsError:
            raise self._taken("another process") from None
        self._unsound.discard(whole)
        self.damaged.pop(whole, None)
        return whole

    def remove(self, path: Path) -> None:
        """Remove the manifest first, so that a kill meanwhile leaves nothing that looks complete."""
        (path / MANIFEST).unlink(missing_ok=True)
        cast(Address, path).rmtree()

    def clean(self) -> None:
        for path in self._steps():
            if not (path / MANIFEST).is_file():
                self.remove(path)

    def _steps(self) -> list[Path]:
        paths = [path for path in self.folder.iterdir() if re.fullmatch("step-[0-9]+", path.name) and path.is_dir()]
        return sorted(paths, key=lambda path: int(path.name.removeprefix("step-")))

    def _take(self) -> None:
        """Raises PlaitError if a later start of the run has begun to save here."""
        mark = self.folder / WRITER
        if not self._writes:
            mark.write_bytes(self._here.encode() + b"\n")
            self._writes = True
        elif (holder := mark.read_bytes().decode(errors="replace").strip()) != self._here:
            raise self._taken(holder.partition(" ")[2])

    def _taken(self, holder: str) -> PlaitError:
        return DiskError(
            f"{self.folder} cannot be written: another start of this run has begun to save there ({holder}); end one "
            "of them, or give one another checkpoint.dir"
        ).at("checkpoint.dir", str(self.folder), "an address of its own")
