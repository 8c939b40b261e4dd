"""Files of a corpus as they are read: decompressed, and without a byte order mark."""

import bz2
import gzip
import io
import lzma
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from plait import PlaitError

HEAD = 1 << 12  # bytes that show what a file is
MARK = b"\xef\xbb\xbf"  # which editors write at the start of UTF-8
ARCHIVES = (".tar", ".tgz", ".tbz", ".tbz2", ".txz", ".zip", ".7z", ".rar")
MAGIC = {  # of files that are not what their name says
    b"\xff\xfe": "in UTF-16",
    b"\xfe\xff": "in UTF-16",
    b"\x1f\x8b": "compressed with gzip, but not named .gz",
    b"BZh": "compressed with bzip2, but not named .bz2",
    b"\xfd7zXZ\x00": "compressed with xz, but not named .xz",
    b"\x28\xb5\x2f\xfd": "compressed with zstd, but not named .zst",
    b"\x04\x22\x4d\x18": "compressed with lz4, but not named .lz4",
    b"PK\x03\x04": "packed in an archive",
    b"PAR1": "in the format of parquet, but not named .parquet",
}


def _arrow(kind: str) -> Callable[[IO[bytes]], Any]:
    def opened(raw: IO[bytes]) -> Any:
        import pyarrow as pa

        return io.BufferedReader(pa.CompressedInputStream(raw, kind), 1 << 16)

    return opened


COMPRESSED: dict[str, Callable[[IO[bytes]], Any]] = {
    ".gz": gzip.open,
    ".bz2": bz2.open,
    ".xz": lzma.open,
    ".lzma": lzma.open,
    ".zst": _arrow("zstd"),
    ".lz4": _arrow("lz4"),
}


def inner_suffix(path: Path) -> tuple[str, str]:
    """The suffix that says what a file is, and that of its compression, or ""; both in lower case."""
    packed = path.suffix.lower()
    if packed in COMPRESSED:
        return Path(path.stem).suffix.lower(), packed
    return packed, ""


class Opened:
    """A file's content from its first byte of text on. position(): how many bytes of the file were read so far."""

    def __init__(self, raw: IO[bytes], content: Any) -> None:
        self._raw, self.content = raw, content
        self.head = content.peek(HEAD)[:HEAD]
        if self.head.startswith(MARK):
            content.read(len(MARK))

    def position(self) -> int:
        return self._raw.tell()


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """A system error inside names the file: reading raises it without a name."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise


@contextmanager
def opened(path: Path) -> Iterator[Opened]:
    """The content of the file at `path`. Raises PlaitError if it cannot be decompressed."""
    packed = inner_suffix(path)[1]
    with naming(path), path.open("rb") as raw:
        if not packed:
            yield Opened(raw, raw)
            return
        try:
            with COMPRESSED[packed](raw) as content:
                yield Opened(raw, content)
        except (EOFError, zlib.error, lzma.LZMAError, OSError) as error:
            if isinstance(error, OSError) and error.errno is not None and not _of_content(error):
                raise
            reason = (str(error) or type(error).__name__).splitlines()[0]
            raise PlaitError(
                f"{path} cannot be decompressed ({packed}); the file is damaged or cut: {reason}"
            ) from error


def _of_content(error: OSError) -> bool:
    """pyarrow raises OSError for content that is not in its format; its number is that of no system error."""
    return error.errno == 0 or "decompress" in str(error).lower()


def strange(path: Path, head: bytes) -> str | None:
    """What a file is instead of text, if its name or its first bytes say so; continues "the file is"."""
    if {suffix.lower() for suffix in path.suffixes[-2:]}.intersection(ARCHIVES) or head[257:262] == b"ustar":
        return "packed in an archive"
    if inner_suffix(path)[0] == "" and inner_suffix(path)[1]:
        return "compressed, under a name that does not say what is inside (NAME.txt.gz does)"
    for magic, what in MAGIC.items():
        if head.startswith(magic):
            return what
    if len(head) > 1 and 4 * head.count(0) >= len(head):
        return "full of zero bytes, as UTF-16 is"
    return None
