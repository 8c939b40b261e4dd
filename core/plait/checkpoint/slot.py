"""One copy of a state in memory that is a file: bytes, notes, and a mark that is written last. Without torch."""

import json
import mmap
import os
import struct
import zlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from plait.checkpoint.pieces import LONGEST

BEGIN = 4096  # of the bytes, on a page of their own; the mark is before them
MARK = struct.Struct("<8sQQI")  # NAME, bytes, bytes of the notes that follow them, CRC-32 of the notes
NAME = b"plait 1\n"
THREADS = 4  # that compute checksums


class Slot:
    """The copy in the file at `path`. A process that is killed while it writes leaves no copy there."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        self._memory: mmap.mmap | None = None

    def close(self) -> None:
        os.close(self._file)
        self._memory = None

    def clear(self) -> None:
        """From now on there is no copy."""
        os.pwrite(self._file, bytes(MARK.size), 0)

    def room(self, size: int) -> memoryview:
        """Room for so many bytes, in place of the copy."""
        self.clear()
        if os.fstat(self._file).st_size < BEGIN + size:
            os.ftruncate(self._file, BEGIN + size)
        return self.view(size)

    def view(self, size: int) -> memoryview:
        """The memory itself."""
        if self._memory is None or len(self._memory) < BEGIN + size:
            self._memory = mmap.mmap(self._file, BEGIN + size)
        return memoryview(self._memory)[BEGIN : BEGIN + size]

    def complete(self, size: int, notes: Mapping[str, Any]) -> None:
        """What is in the room is the copy. Takes its checksums."""
        self.seal(size, json.dumps({**notes, "size": size, "crcs": self._crcs(size)}).encode())

    def seal(self, size: int, text: bytes) -> None:
        """What is in the room is a copy that was completed elsewhere with these notes."""
        os.pwrite(self._file, text, BEGIN + size)
        os.pwrite(self._file, MARK.pack(NAME, size, len(text), zlib.crc32(text)), 0)

    def notes(self) -> dict[str, Any] | None:
        """Those of the copy, with its `size`; None if there is no whole copy."""
        mark = os.pread(self._file, MARK.size, 0)
        if len(mark) < MARK.size:
            return None
        name, size, length, crc = MARK.unpack(mark)
        if name != NAME or BEGIN + size + length > os.fstat(self._file).st_size:
            return None
        text = os.pread(self._file, length, BEGIN + size)
        return json.loads(text) if zlib.crc32(text) == crc else None

    def is_sound(self) -> bool:
        """Whether every byte is as it was written."""
        notes = self.notes()
        return notes is not None and self._crcs(notes["size"]) == notes["crcs"]

    def _crcs(self, size: int) -> list[int]:
        whole = self.view(size)
        with ThreadPoolExecutor(THREADS) as threads:  # it releases Python's lock
            return list(threads.map(lambda at: zlib.crc32(whole[at : at + LONGEST]), range(0, size, LONGEST)))
