"""Who holds the store in which machines meet: one that may, and whose folder says so."""

import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from plait.launch.connection import Connection
from tests.helpers.commands import free_port

HERE = "127.0.0.1"


@pytest.fixture
def connected():
    """connected(port, may, own): a connection that looks in a thread of its own, and what it asked the folder.

    may: whether the folder lets it take the holder's place.
    """
    begun: list[tuple[Connection, threading.Thread]] = []

    def connected(port: int, may: bool, own: str = "", seconds: float = 60.0) -> tuple[Connection, list[bool]]:
        asked: list[bool] = []
        hosting: Any = SimpleNamespace(take=lambda again: asked.append(again) or may, where=lambda: None)
        one = Connection("run", HERE, port, time.monotonic() + seconds, hosting, own=own)
        thread = threading.Thread(target=one.watch)
        thread.start()
        begun.append((one, thread))
        return one, asked

    yield connected
    for one, thread in begun:
        one.left.set()
        thread.join()


def wait_for(what: Any) -> None:
    while not what():
        time.sleep(0.01)


def test_one_that_may_hold_the_store_does_and_others_find_it(connected):
    port = free_port()
    holder, asked = connected(port, may=True, own=HERE)
    wait_for(lambda: holder.store is not None)
    assert (holder.is_host, holder.host, holder.port, asked) == (True, HERE, port, [False])
    other, nothing = connected(port, may=True)
    wait_for(lambda: other.store is not None and holder.store.check(["peer"]))
    assert (other.is_host, other.broken, nothing) == (False, None, []), "it may not hold it, and takes no place"
    assert holder.store.get("peer").decode() == HERE


@pytest.mark.parametrize("own", ["", HERE])
def test_looking_is_given_up_with_the_reason(connected, own):
    one, asked = connected(free_port(), may=False, own=own, seconds=0.0)
    wait_for(lambda: one.broken is not None)
    assert (one.store, one.is_host, one.trouble) == (None, False, "Connection refused")
    assert bool(asked) == bool(own)
