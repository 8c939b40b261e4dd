"""A launcher's connection to the store in which the machines of a run meet, which one of them holds.

A call to a store whose machine is off does not return for minutes. So threads of its own make all calls, and a
connection that is given up is replaced as a whole: its threads end when their calls do.
"""

import datetime
import os
import socket
import threading
import time

from torch.distributed import PrefixStore, Store, TCPStore
from torch.distributed.elastic.rendezvous import RendezvousError

from plait.contract.errors import PlaitError
from plait.launch.handler import GIVEN_UP, MeetingHandler
from plait.launch.hosting import Ended, Hosting
from plait.system.addresses import is_loopback, towards
from plait.system.errors import one_line


class Connection:
    """It looks for the machine that holds the store at `host:port`, or where the run's folder says.

    until: when it gives up looking. again: in the place of a connection that is lost. own: where others reach this
    machine, if it may hold the store itself.

    store: None until it is reached. broken: when it was lost, or looking for it was given up. trouble: why. answered:
    when it last answered. refusal: another machine's. taken: another machine has taken this one's place as the holder.
    has_heir: another may, if this one holds the store and leaves.
    """

    def __init__(
        self, run: str, host: str, port: int, until: float, hosting: Hosting, again: bool = False, own: str = ""
    ) -> None:
        self.run, self.host, self.port, self.until, self.hosting = run, host, port, until, hosting
        self.again, self.own = again, own
        self.store: Store | None = None
        self.handler: MeetingHandler | None = None
        self.is_host = self.taken = self.has_heir = False
        self.refusal: str | None = None
        self.broken: float | None = None
        self.trouble, self.answered, self.left = "nothing listens there", time.monotonic(), threading.Event()

    def _listens(self, port: int) -> bool:
        """Whether this machine now holds the store; not if the port is another program's, or another launcher's."""
        try:
            self._reach(self.host, port, is_master=True)
        except (RuntimeError, ValueError, OSError):
            return False
        self.is_host = True
        return True

    def _reach(self, host: str, port: int, is_master: bool) -> None:
        """Two connections, because a call that waits for a key keeps its connection to itself."""
        limit = datetime.timedelta(seconds=GIVEN_UP)
        whole = TCPStore(host, port, is_master=is_master, multi_tenant=is_master, timeout=limit)
        notes = TCPStore(host, whole.port, is_master=False, timeout=limit)
        self.whole, self.host, self.port, self.answered = whole, host, whole.port, time.monotonic()
        self.store = PrefixStore(f"plait/{self.run}", notes)

    def _look(self) -> None:
        """Until the machine that holds the store is there, or this one holds it."""
        endpoint = (self.host, self.port)
        while self.store is None and not self.left.is_set():
            try:
                if self.again:
                    self.hosting.check_goes_on()
                if not self._hold(endpoint[1]):
                    self._call(endpoint)
            except Ended:
                self.broken, self.trouble = time.monotonic(), "it has ended"
                return
            except (RuntimeError, ValueError, OSError, PlaitError) as error:
                if isinstance(error, OSError):
                    self.trouble = os.strerror(error.errno) if error.errno else "it does not answer"
            if self.store is None and time.monotonic() > self.until:
                self.broken = time.monotonic()
                return
            self.left.wait(0.3 if self.store is None else 0)

    def _hold(self, port: int) -> bool:
        try:
            taken = self.own != "" and self.hosting.take(again=self.again)
        except (OSError, PlaitError):
            taken = not self.again  # the others shall hear why the run cannot use its folder
        self.host = self.own if taken else self.host
        return taken and (self._listens(port) or (self.again and self._listens(0)))

    def _call(self, endpoint: tuple[str, int]) -> None:
        if (other := self.hosting.where()) is not None:
            self.host, self.port = other
        elif self.own and self.again:
            return
        else:
            self.host, self.port = endpoint
        with socket.create_connection((self.host, self.port), 2):
            self.trouble = "what listens there has not answered, and may be another program"
        self._reach(self.host, self.port, is_master=False)

    def watch(self) -> None:
        """Ask the store every second who is there, for as long as it answers."""
        if self.store is None:
            self._look()
        own = towards(self.host, self.port)
        try:
            if self.store is not None and not self.is_host and own is not None:
                self.store.set("peer", own)
            while self.store is not None and not self.left.wait(0.5):
                if self.refusal is None and self.store.check(["refused"]):
                    self.refusal = self.store.get("refused").decode()
                    self.store.add("refused/read", 1)
                if self.handler is not None:
                    self.handler.look()
                self.answered = time.monotonic()
        except (RuntimeError, RendezvousError) as error:
            self.broken, self.trouble = time.monotonic(), one_line(error.__cause__ or error)

    def guard(self) -> None:
        """Every second: the holder sees that the folder still says so; others see that its lock keeps them out."""
        hosting, told = self.hosting, False
        while not self.left.wait(1.0 if told or hosting.proven else 0.2):
            try:
                if self.store is None:
                    continue
                if not self.is_host:
                    if not hosting.proven and self.store.check(["hosts"]):
                        hosting.prove(self.store.get("hosts").decode())
                    if hosting.proven and not told and self.handler is not None:
                        self.handler.offer()
                        told = True
                elif not hosting.is_own():
                    self.taken = True
                elif not told and hosting.held:
                    self.store.set("hosts", hosting.say(self.host, self.port))
                    told = True
                elif told and self.handler is not None:
                    self.has_heir = self.handler.has_heir()
            except (RuntimeError, OSError, PlaitError):  # the store is lost, or the folder cannot be read now
                continue

    def address(self) -> str | None:
        """This machine's address for the others. The name of the machine that holds the store may be loopback there:
        then only another machine's address shows the way. None if it does not come to that in time."""
        while self.store is None:
            if self.broken is not None or self.left.wait(0.05):
                return None
        while not self.is_host and not self.store.check(["holder"]):  # without it none can begin
            if time.monotonic() > self.until or self.left.wait(0.1):
                return None
        own = towards(self.host, self.port)
        if not self.is_host or (own is not None and not is_loopback(own)):
            return own
        while not self.store.check(["peer"]):
            if time.monotonic() > self.until or self.left.wait(0.1):
                return None
        return towards(self.store.get("peer").decode(), self.port)
