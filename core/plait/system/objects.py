"""Places in object stores: an address such as `s3://bucket/run`, with the methods of a Path that checkpoints need.

fsspec speaks the protocols. What a store refuses is a DiskError, in words; what may pass is tried again here.
"""

import contextlib
import errno
import io
import logging
import secrets
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

from plait.contract.errors import PlaitError, near_miss
from plait.system.errors import DiskError, visible

T = TypeVar("T")
PATIENCE = 60.0  # seconds for which a call is tried again; libraries try some errors again on their own before that
QUIET = 10.0  # seconds after which a line says so
AHEAD = 8 << 20  # bytes that are fetched at once
PASSING = {None, errno.EIO, errno.EBUSY, errno.EAGAIN, errno.ETIMEDOUT}  # errors of a store that may pass
PACKAGES = {"s3": ("s3fs", "[s3]"), "s3a": ("s3fs", "[s3]"), "gs": ("gcsfs", "[gs]"), "gcs": ("gcsfs", "[gs]")}
LIBRARIES = ("aiohttp", "botocore", "aiobotocore", "gcsfs", "requests", "urllib3")  # whose errors are the network's
KEYS = {
    "s3fs": "AWS_PROFILE, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
    "gcsfs": "GOOGLE_APPLICATION_CREDENTIALS, or gcloud auth application-default login",
}
log = logging.getLogger("plait")


class Unreachable(DiskError):
    """The store could not be reached, or failed on its own: a later call may succeed."""


class Address:
    """One object, or all below it. size: of the object, if a listing said it.

    Every method raises Unreachable after `PATIENCE` seconds, DiskError if the store refuses, and FileNotFoundError.
    """

    def __init__(self, url: str, size: int | None = None) -> None:
        self._url, self._size = url.rstrip("/"), size

    def __str__(self) -> str:
        return self._url

    def __repr__(self) -> str:
        return f"Address({self._url!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Address) and self._url == other._url

    def __hash__(self) -> int:
        return hash(self._url)

    def __truediv__(self, name: str) -> "Address":
        return Address(f"{self._url}/{name}")

    @property
    def parent(self) -> "Address":
        return Address(self._url.rpartition("/")[0])

    @property
    def name(self) -> str:
        return self._url.rpartition("/")[2]

    @property
    def stem(self) -> str:
        return self.name.rpartition(".")[0] or self.name

    def is_symlink(self) -> bool:
        return False

    def is_file(self) -> bool:
        return self._size is not None or self._kind() == "file"

    def is_dir(self) -> bool:
        return self._size is None and self._kind() == "directory"

    def exists(self) -> bool:
        return self._size is not None or self._kind() is not None

    def stat(self) -> SimpleNamespace:
        """Its `st_size` alone."""
        if self._size is None:
            self._size = int(self._call(lambda fs, path: fs.info(path))["size"])
        return SimpleNamespace(st_size=self._size)

    def iterdir(self) -> "list[Address]":
        """What is directly below; nothing if there is nothing."""
        try:
            entries = self._call(lambda fs, path: fs.ls(path, detail=True))
        except FileNotFoundError:
            return []
        below = {entry["name"].rstrip("/").rpartition("/")[2]: entry for entry in entries}
        return [
            Address(f"{self._url}/{name}", int(entry["size"]) if entry["type"] == "file" else None)
            for name, entry in below.items()
            if name and name != self.name
        ]

    def read_bytes(self) -> bytes:
        return self._call(lambda fs, path: fs.cat_file(path))

    def open(self, mode: str = "rb", buffering: int = 0) -> io.RawIOBase:
        return _Download(self)

    def write_bytes(self, content: bytes) -> None:
        """One PUT: there is the new content or that of before."""
        self._call(lambda fs, path: fs.pipe_file(path, content), "cannot be written", lost=True)

    def create(self, content: bytes) -> None:
        """The same for a new object. Raises FileExistsError if another has that name, unless its content is this: an
        earlier try may have arrived."""
        try:
            self._call(lambda fs, path: fs.pipe_file(path, content, mode="create"), "cannot be written", lost=True)
        except FileExistsError:
            if self.read_bytes() != content:
                raise

    def put(self, file: Path) -> None:
        """The content of a file: all of it is there, or nothing."""
        self._call(lambda fs, path: fs.put_file(str(file), path), "cannot be written", lost=True)

    def upload(self) -> "Upload":
        """A stream for new content, which is there when it is closed."""
        return Upload(self)

    def unlink(self, missing_ok: bool = True) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._call(lambda fs, path: fs.rm_file(path), "cannot be removed")

    def rmtree(self) -> None:
        """Remove all below it."""
        with contextlib.suppress(FileNotFoundError):
            self._call(lambda fs, path: fs.rm(path, recursive=True), "cannot be removed")

    def check(self, what: str) -> None:
        """Raises DiskError, beginning with `what`, unless an object can be written below this address and removed."""
        probe = self / f".plait-{secrets.token_hex(8)}"
        try:
            probe._call(lambda fs, path: fs.pipe_file(path, b"plait\n"), patience=0, lost=True)
            probe._call(lambda fs, path: fs.rm_file(path), patience=0)
        except DiskError as error:
            told = DiskError(f"{what} {str(error).partition(': ')[2]}")
            raise told.at("checkpoint.dir", str(self), "an address that can be written") from None

    def _kind(self) -> str | None:
        try:
            return self._call(lambda fs, path: fs.info(path))["type"]
        except FileNotFoundError:
            return None

    def _call(
        self,
        work: Callable[[Any, str], T],
        cannot: str = "cannot be read",
        patience: float | None = None,
        lost: bool = False,
    ) -> T:
        """What `work(file system, path)` returns. lost: FileNotFoundError means that there is no such bucket."""
        failing: float | None = None  # since when: an upload may take longer than the patience, and fail once
        pause, said = 0.25, False
        patience = PATIENCE if patience is None else patience
        while True:
            try:
                return work(*self.opened())
            except (FileNotFoundError, FileExistsError) as error:
                if not lost or isinstance(error, FileExistsError):
                    raise
                raise refusal(self, error, cannot) from None
            except Exception as error:
                failing = time.monotonic() if failing is None else failing
                refused, waited = refusal(self, error, cannot), time.monotonic() - failing
                if not isinstance(refused, Unreachable) or waited + pause > patience:
                    raise refused from None
                if waited > QUIET and not said:
                    log.warning(f"{refused}; trying again for {patience - waited:.0f} s")
                    said = True
            time.sleep(pause)
            pause = min(2 * pause, 2.0)

    def opened(self) -> tuple[Any, str]:
        """fsspec's file system of this process, and the path in it."""
        import fsspec

        try:
            return fsspec.url_to_fs(self._url, use_listings_cache=False)
        except ImportError:
            protocol = self._url.partition("://")[0]
            package, extra = PACKAGES.get(protocol, ("", ""))
            need = f": pip install 'plait-core{extra}'" if package else ""
            raise DiskError(f"{self._url} cannot be opened: {protocol}:// needs the package {package}{need}") from None
        except ValueError:
            known = sorted({*PACKAGES, *fsspec.available_protocols()})
            protocol = self._url.partition("://")[0]
            raise DiskError(
                f"{self._url} cannot be opened: fsspec knows no {protocol}://{near_miss(protocol, known)}"
            ) from None


def refusal(address: Address, error: Exception, cannot: str) -> PlaitError:
    """What the libraries raised, as a sentence: an Unreachable if a later call may succeed."""
    if isinstance(error, PlaitError):
        return error
    protocol, _, rest = str(address).partition("://")
    text, kind = visible(str(error)) or type(error).__name__, DiskError
    if "Credential" in type(error).__name__ or "credentials" in text.lower():
        keys = KEYS.get(PACKAGES.get(protocol, ("", ""))[0], "those of this store")
        text = f"there are no credentials that fit; set {keys}"
    elif isinstance(error, PermissionError):
        text = f"access is denied ({text})"
    elif isinstance(error, FileNotFoundError):
        text = f"there is no bucket {rest.partition('/')[0]!r}; create it, or name another"
    elif _may_pass(error):
        text, kind = f"the store cannot be reached ({text})", Unreachable
    return kind(f"{address} {cannot}: {text}")


def _may_pass(error: Exception) -> bool:
    of_the_network = isinstance(error, ConnectionError | TimeoutError)
    return of_the_network or getattr(error, "errno", 0) in PASSING or type(error).__module__.startswith(LIBRARIES)


class _Download(io.RawIOBase):
    """Reads ahead, because most readers ask for small parts in the order of the object."""

    def __init__(self, address: Address) -> None:
        self._address, self._at, self._file = address, 0, None
        self._length = address.stat().st_size

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = offset + (0, self._at, self._length)[whence]
        return self._at

    def readinto(self, into: Any) -> int:
        def fetch(fs: Any, path: str) -> bytes:
            file, self._file = self._file or fs.open(path, "rb", block_size=AHEAD, cache_type="readahead"), None
            file.seek(self._at)
            data = file.read(len(into))
            self._file = file  # not after an error
            return data

        data = self._address._call(fetch)
        into[: len(data)] = data
        self._at += len(data)
        return len(data)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
        super().close()


class Upload(io.RawIOBase):
    """Sends what is written in large parts. No part is sent again here: who writes begins anew."""

    def __init__(self, address: Address) -> None:
        self._address, self._written = address, 0
        with self._told():
            fs, path = address.opened()
            self._file: Any = fs.open(path, "wb")

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        with self._told():
            self._file.write(data)
        self._written += len(data)
        return len(data)

    def tell(self) -> int:
        return self._written

    def close(self) -> None:
        """The object is complete."""
        if not self.closed:
            try:
                with self._told():
                    self._file.close()
            finally:
                super().close()

    def abort(self) -> None:
        """Nothing of it stays, if the store can be reached."""
        with contextlib.suppress(Exception):
            self._file.discard()
        with contextlib.suppress(Exception):
            self._file.closed = True  # otherwise fsspec would complete it when Python collects it
        super().close()

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            raise refusal(self._address, error, "cannot be written") from None
