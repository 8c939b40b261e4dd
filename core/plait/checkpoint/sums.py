"""`SHA256SUMS` in a folder of weights: a digest of every file, in the format of `sha256sum`."""

import os
import re
from pathlib import Path, PurePosixPath

from plait.checkpoint.files import digests, write_synced
from plait.contract.errors import PlaitError
from plait.system.disk import check_regular

SUMS = "SHA256SUMS"
LINE = re.compile(r"([0-9a-fA-F]{64}) [ *](.+)")


def write_sums(folder: Path) -> None:
    """Write the digests of all files in `folder`. Call it when the files are complete."""
    files = sorted(file for file in folder.iterdir() if file.name != SUMS)
    sums = zip(digests(files), files, strict=True)
    write_synced(folder / SUMS, "".join(f"{sha256}  {file.name}\n" for sha256, file in sums))


def check_sums(path: Path) -> None:
    """Raise PlaitError, naming the first file of the folder `path` that does not match its SHA256SUMS.

    If `path` is a file, only that file is compared. A folder without a SHA256SUMS passes.
    """
    folder = path if path.is_dir() else path.parent
    if not os.path.lexists(folder / SUMS):
        return
    try:
        check_regular(folder / SUMS)
        expected = _parsed(folder / SUMS)
    except (OSError, ValueError) as error:
        raise PlaitError(f"{folder / SUMS} cannot be read: {error}") from None
    if folder != path:
        expected = {name: sha256 for name, sha256 in expected.items() if name == path.name}
    for name in expected:
        if not (folder / name).is_file():
            raise PlaitError(f"{folder / name} is missing, which {SUMS} lists: copy the folder again, or remove {SUMS}")
    try:
        sums = digests([folder / name for name in expected])
    except OSError as error:
        raise PlaitError(f"the weights in {folder} cannot be read: {error}") from None
    for (name, sha256), actual in zip(expected.items(), sums, strict=True):
        if sha256 != actual:
            raise PlaitError(
                f"{folder / name} was changed after {SUMS} was written (sha256 differs): copy the folder again, or "
                f"remove {SUMS} if you changed it on purpose"
            )


def _parsed(file: Path) -> dict[str, str]:
    """Name -> digest. Raises ValueError, in words, for lines that `sha256sum` does not write for files in this
    folder."""
    expected = {}
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
        match = LINE.fullmatch(line)
        if match is None:
            raise ValueError(f"line {number} is not a digest and a name")
        name = PurePosixPath(match[2])
        if name.is_absolute() or ".." in name.parts or "\0" in match[2]:
            raise ValueError(f"line {number} names {match[2]!r}, which is not in the folder")
        expected[str(name)] = match[1].lower()
    return expected
