"""Copies that machines hold for each other: a server in each launcher, and what ranks ask of it. Without torch.

A request is one line of JSON with the launcher's secret, which only the ranks of the run know. To `put` a copy its
bytes and its notes follow, and one byte comes back when it is whole. To `get` one brings a line with its lengths, then
the same.
"""

import contextlib
import hmac
import json
import os
import secrets
import socket
import threading
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import IO

from plait.checkpoint.pieces import LONGEST
from plait.checkpoint.slot import Slot
from plait.system.held_memory import ADDRESS, EACH

SILENT = 10.0  # seconds for which a piece of a copy may be on its way
LINE = 1000  # bytes of a request, at most


@contextlib.contextmanager
def serving(places: Sequence[str], host: str) -> Iterator[None]:
    """Inside, ranks of other machines reach the pieces at `places` through this machine's address `host`, and put
    their copies into the second half of them."""
    secret = secrets.token_hex(16)
    with socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET) as server:
        os.environ[ADDRESS] = f"{secret} {server.getsockname()[1]} {host}"
        copies = _Copies(places, secret)
        threading.Thread(target=_serve, args=(server, copies), daemon=True).start()
        try:
            yield
        finally:
            del os.environ[ADDRESS]
            server.shutdown(socket.SHUT_RDWR)  # else the thread would go on waiting
            copies.close()


def put(at: str, rank: int, slot: Slot) -> None:
    """Send the copy in `slot` to the machine at the address `at`, as that of the rank with the local number `rank`.

    Returns when it is whole there. Raises OSError if it cannot be, or nothing moves for `SILENT` seconds.
    """
    notes = slot.notes()
    assert notes is not None
    with _asked(at, {"put": rank, "size": notes["size"], "notes": len(text := json.dumps(notes).encode())}) as (
        file,
        to,
    ):
        _send(to, slot.view(notes["size"]), text)
        if not file.read(1):
            raise ConnectionError("the machine that holds this one's copies did not take one")


def get(at: str, number: int, into: Slot) -> None:
    """Fetch the copy in piece `number` of the machine at the address `at`. Raises OSError as `put` does."""
    with _asked(at, {"get": number}) as (file, _):
        told = json.loads(file.readline(LINE) or b"null")
        if told is None:
            raise ConnectionError("it is no longer there")
        _receive(file, into, **told)


@contextlib.contextmanager
def _asked(at: str, request: dict[str, int]) -> Iterator[tuple[IO[bytes], socket.socket]]:
    secret, port, host = at.split(" ")
    with socket.create_connection((host, int(port)), SILENT) as to, to.makefile("rb") as file:
        to.sendall(json.dumps({"secret": secret, **request}).encode() + b"\n")
        yield file, to


def _serve(server: socket.socket, copies: "_Copies") -> None:
    with contextlib.suppress(OSError):
        while True:
            channel, _ = server.accept()
            threading.Thread(target=copies.answer, args=(channel,), daemon=True).start()


class _Copies:
    def __init__(self, places: Sequence[str], secret: str) -> None:
        self._slots, self._secret = [Slot(place) for place in places], secret
        self._locks = defaultdict[int, threading.Lock](threading.Lock)
        self._last: dict[int, socket.socket] = {}  # rank -> through which its last copy came

    def close(self) -> None:
        for slot in self._slots:
            slot.close()

    def answer(self, channel: socket.socket) -> None:
        with channel, channel.makefile("rb") as file, contextlib.suppress(OSError, ValueError, KeyError, IndexError):
            channel.settimeout(SILENT)
            told = json.loads(file.readline(LINE))
            if not hmac.compare_digest(str(told["secret"]), self._secret):
                return
            if "get" in told:
                slot = self._slots[told["get"]]
                if (notes := slot.notes()) is not None:
                    text = json.dumps(notes).encode()
                    channel.sendall(json.dumps({"size": notes["size"], "notes": len(text)}).encode() + b"\n")
                    _send(channel, slot.view(notes["size"]), text)
            else:
                self._take(told["put"], channel, file, told["size"], told["notes"])

    def _take(self, rank: int, channel: socket.socket, file: IO[bytes], size: int, notes: int) -> None:
        """Into the piece with the older copy. A rank that started again breaks off what it sent before."""
        first = len(self._slots) // 2 + EACH * rank
        before, self._last[rank] = self._last.get(rank), channel
        if before is not None:
            with contextlib.suppress(OSError):
                before.shutdown(socket.SHUT_RDWR)
        with self._locks[rank]:
            _receive(file, min(self._slots[first : first + EACH], key=_step), size, notes)
        channel.sendall(b"1")


def _step(slot: Slot) -> int:
    return (slot.notes() or {"step": -1})["step"]


def _send(channel: socket.socket, whole: memoryview, notes: bytes) -> None:
    for at in range(0, len(whole), LONGEST):
        channel.sendall(whole[at : at + LONGEST])
    channel.sendall(notes)


def _receive(file: IO[bytes], into: Slot, size: int, notes: int) -> None:
    room = into.room(size)
    for at in range(0, size, LONGEST):
        part = room[at : at + LONGEST]
        if file.readinto(part) != len(part):  # type: ignore[attr-defined]
            raise ConnectionError("the other machine broke off")
    text = file.read(notes)
    if len(text) != notes:
        raise ConnectionError("the other machine broke off")
    into.seal(size, text)
