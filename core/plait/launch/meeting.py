"""The machines of one run: how their launchers find each other, what they tell each other, and which one is lost.

They share torch's store, which the machine of `launch.rdzv_endpoint` holds. A call to a store whose machine is off does
not return for minutes, so the main thread, which must hear signals, leaves all calls to others.
"""

import contextlib
import datetime
import math
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from torch.distributed import DistError, PrefixStore, Store, TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousError,
    RendezvousGracefulExitError,
    RendezvousTimeoutError,
)

from plait.contract.config import Launch
from plait.contract.errors import PlaitError
from plait.launch.external import meeting_point
from plait.launch.handler import GIVEN_UP, SILENT, MeetingHandler
from plait.system.addresses import is_here, is_loopback, towards
from plait.system.errors import one_line
from plait.system.signals import STOP_SIGNALS

T = TypeVar("T")

FIRST_LINE, LINES = 5.0, 30.0  # seconds of waiting before the first line, and between others
LAST_WORDS = 15.0  # seconds for which a machine that refuses waits for others, to tell them
GOODBYE = 5.0  # seconds for which the machines wait for each other at the end


class Apart(Exception):
    """The machines did not meet, or the machine that holds the store is gone. about: for `PlaitError.at`."""

    def __init__(self, sentence: str, *about: Any) -> None:
        super().__init__(sentence)
        self.about = about


class Over(Apart):
    """The run ended without this machine, which was a spare."""


class Meeting:
    """This machine's part. It listens, or looks for the machine that does, from the start.

    Raises PlaitError if the endpoint is impossible, or its port is another program's.
    """

    def __init__(self, launch: Launch, run: str, say: Callable[[str], None]) -> None:
        self.launch, self.run, self.say = launch, str(launch.run_id or run), say
        self.host, _, port = meeting_point(launch).rpartition(":")
        self.host, self.port, self.name = self.host.strip("[]"), int(port), socket.gethostname()
        self.handler: MeetingHandler | None = None
        self.address = ""  # where the others reach this machine, once `join` has found it out
        self.counts: Sequence[int] = launch.machines  # how many machines may train
        self.changed = False  # whether other machines met for this start of the ranks than for the one before
        self.store: Store | None = None
        self.refusal: str | None = None  # another machine's
        self.trouble = "nothing listens there"  # why the store is not reached yet, or no longer
        self._broken: float | None = None  # when the connection was lost, or looking for the store was given up
        self._answered = time.monotonic()
        self._silent, self._asked, self._spare = 0.0, time.monotonic(), False
        self._until = time.monotonic() + launch.rendezvous_seconds
        self._left, self._threads = threading.Event(), list[threading.Thread]()
        self.is_host = is_here(self.host, self.port) and self._listen()
        self._begin(self._watch)

    def __enter__(self) -> "Meeting":
        return self

    def __exit__(self, *_: object) -> None:
        """End the threads, if they do not wait for a machine that is off: none may be inside torch when Python ends."""
        self._left.set()
        if self.handler is not None:
            self._begin(self.handler.leave)
        deadline = time.monotonic() + GOODBYE
        for thread in self._threads:
            thread.join(max(deadline - time.monotonic(), 0))

    def _begin(self, work: Callable[[], object]) -> threading.Thread:
        thread = threading.Thread(target=work, daemon=True)
        self._threads = [each for each in self._threads if each.is_alive()]
        self._threads.append(thread)
        thread.start()
        return thread

    # --- the store

    def _listen(self) -> bool:
        """Whether this machine now holds the store; not if another launcher of this machine does."""
        try:
            self._reach(is_master=True)
        except (RuntimeError, ValueError, OSError):
            return False
        return True

    def _reach(self, is_master: bool) -> None:
        """Two connections, because a call that waits for a key keeps its connection to itself."""
        where, limit = (self.host, self.port), datetime.timedelta(seconds=GIVEN_UP)
        whole = TCPStore(*where, is_master=is_master, multi_tenant=is_master, timeout=limit)
        notes = TCPStore(*where, is_master=False, timeout=limit)
        self._whole, self._answered = whole, time.monotonic()
        self.store = PrefixStore(f"plait/{self.run}", notes)

    def _look(self) -> None:
        """Look for the machine that holds the store until it is there."""
        while self.store is None and not self._left.is_set():
            try:
                with socket.create_connection((self.host, self.port), 2):
                    self.trouble = "another program listens there"
                self._reach(is_master=False)
            except (RuntimeError, ValueError, OSError) as error:
                if isinstance(error, OSError):
                    self.trouble = os.strerror(error.errno) if error.errno else "it does not answer"
                if time.monotonic() > self._until:
                    self._broken = time.monotonic()
                    return
                self._left.wait(0.3)

    def _watch(self) -> None:
        """Ask the store every second who is there, for as long as it answers."""
        if self.store is None:
            self._look()
        own = towards(self.host, self.port)
        try:
            if self.store is not None and not self.is_host and own is not None:
                self.store.set("peer", own)
            while self.store is not None and not self._left.wait(0.5):
                if self.refusal is None and self.store.check(["refused"]):
                    self.refusal = self.store.get("refused").decode()
                    self.store.add("refused/read", 1)
                if self.handler is not None:
                    self.handler.look()
                self._answered = time.monotonic()
        except (RuntimeError, RendezvousError) as error:
            self._broken, self.trouble = time.monotonic(), one_line(error.__cause__ or error)

    # --- waiting

    def patiently(self, work: Callable[[], T], within: float = math.inf, line: Callable[[], str] = lambda: "") -> T:
        """What `work()` returns, on another thread; meanwhile this one hears signals and refusals, and says `line`.

        Raises what `work` raises, PlaitError if another machine refuses the run, and TimeoutError after `within`
        seconds.
        """
        ended: list[Any] = []

        def do() -> None:
            try:
                ended.append((work(), None))
            except BaseException as error:
                ended.append((None, error))

        thread, began, told = self._begin(do), time.monotonic(), 0.0
        while not ended:
            thread.join(0.05)
            waited = time.monotonic() - began
            self._check()
            if waited > within:
                raise TimeoutError
            if waited >= told + (LINES if told else FIRST_LINE) and (text := line()):
                told = waited
                self.say(text)
        value, error = ended[0]
        if error is not None:
            raise error
        return value

    def join(self) -> MeetingHandler:
        """The rendezvous of the machines, once this one knows its address. Raises Apart if nobody comes."""
        if self.handler is None:
            try:
                own = self.patiently(self._address, line=self._line)
                if own is None:
                    raise self.apart()
                assert self.store is not None
                self.address = own
                self.handler = MeetingHandler.of(
                    *(self._whole, self.run, self.launch, own, self.name, self.is_host, self.store, self.counts)
                )
            except DistError as error:  # the machine that holds the store has just left
                raise self.apart(error) from None
        return self.handler

    def _address(self) -> str | None:
        """This machine's address for the others. The name of the machine that holds the store may be loopback there:
        then only another machine's address shows the way."""
        while self.store is None:
            if self._broken is not None or self._left.wait(0.05):
                return None
        while not self.is_host and not self.store.check(["holder"]):  # without it none can begin
            if time.monotonic() > self._until or self._left.wait(0.1):
                return None
        own = towards(self.host, self.port)
        if not self.is_host or (own is not None and not is_loopback(own)):
            return own
        while not self.store.check(["peer"]):
            if time.monotonic() > self._until or self._left.wait(0.1):
                return None
        return towards(self.store.get("peer").decode(), self.port)

    def rendezvous(self, work: Callable[[], None]) -> None:
        """Meet, by `work`, again and again while a machine is lost as the others meet.

        Raises Over, or Apart if the machines did not meet in time or the store's machine is gone.
        """
        assert self.handler is not None
        handler, began = self.handler, time.monotonic()
        before, handler.members = handler.members, None
        while True:
            try:
                self.patiently(work, line=self._line)
                self._say_who_changed(before)
                return
            except (RendezvousGracefulExitError, RendezvousClosedError):
                raise self._over() from None
            except (RendezvousError, DistError) as error:
                if isinstance(error, RendezvousTimeoutError) and handler.trains_without():
                    began = time.monotonic()
                    continue
                if handler.is_spare():  # whoever holds the store may be gone before it has read that the run ended
                    raise self._over() from None
                late = time.monotonic() - began > self.launch.rendezvous_seconds
                if late or self._broken is not None or isinstance(error, RendezvousError):
                    raise self.apart(error) from None
                self.say("a machine was lost while the machines met; they meet again")
                self._left.wait(1.0)  # if the store's machine is gone, `_watch` knows by then

    def _say_who_changed(self, before: set[Any] | None) -> None:
        """before: the machines of the last start, None for the first."""
        handler = self.handler
        assert handler is not None
        now = handler.members or set()
        self.changed = before is not None and now != before
        if not self.launch.elastic or not (self.changed or before is None):
            return
        ours, theirs = ({handler.name_of(node) for node in nodes} for nodes in (now, before or set()))
        news = [
            *([f"{' and '.join(sorted(theirs - ours))} left"] if theirs - ours else []),
            *([f"{' and '.join(sorted(ours - theirs))} came"] if before is not None and ours - theirs else []),
            *(["a machine came back"] if self.changed and ours == theirs else []),
        ]
        train = f"{len(now)} machine{'s' * (len(now) != 1)}: {', '.join(sorted(ours))}"
        self.say(f"{'; '.join([*news, 'going on' if before is not None else 'beginning'])} with {train}")

    def _over(self) -> Over:
        return Over(f"the run has ended, and {self.name} was not needed", "launch.nnodes", self.launch.nnodes)

    def _line(self) -> str:
        """Who is here, and who is not."""
        if self.store is None:
            return f"waiting for the machine {self.host} at launch.rdzv_endpoint={self._endpoint}: {self.trouble}"
        if (silent := time.monotonic() - self._answered) > FIRST_LINE:
            return f"{self._holder} has not answered for {silent:.0f} s"
        here = self.handler.names() if self.handler is not None else [self.name]
        spare = self.handler is not None and self.handler.is_spare()
        told, self._spare = self._spare, spare
        if spare:
            training = ", ".join(name for name in here if name != self.name) or "others"
            line = f"{self.name} is a spare: {training} train already; it waits to replace one that is lost"
            return "" if told else line
        if self.handler is not None and (others := self.handler.unfinished()):
            return f"waiting for {' and '.join(others)}, given up after {GIVEN_UP} s without a sign of life"
        missing = self.counts[0] - len(here)
        if missing > 0:
            return f"waiting for {missing} of {self.counts[0]} machines; here: {', '.join(here)}"
        return f"waiting for {self._holder}, which checks the run" if self.handler is None else ""

    # --- while ranks run

    def lost(self) -> str | None:
        """What to say of machines that have not answered for some time; None if all have.

        Raises Apart if the store's machine closed the connection, but ranks still run some seconds later.
        """
        now = time.monotonic()
        self._silent += min(now - self._asked, 1.0)  # not more: this process may have been stopped
        self._asked = now
        if self._broken is not None:
            if now > self._broken + GOODBYE:
                raise self.apart()
            return None
        if now - self._answered < 2.0:
            self._silent = 0.0
        if self._silent > SILENT:
            self._silent = 0.0
            return f"{self._holder} has not answered for {SILENT:g} s"
        if self.handler is None or not (gone := self.handler.gone()):
            return None
        return f"{' and '.join(gone)} {'has' if len(gone) == 1 else 'have'} not answered for {SILENT:g} s"

    # --- the end

    def says_stop(self) -> None:
        """A signal ends the run if it came to the machine that holds the store; another one only leaves an elastic
        run."""
        store = self.store
        if self.is_host and store is not None:
            self._begin(lambda: store.set("stopped", "1")).join(1)

    def leaves(self) -> bool:
        """Whether a signal to this machine lets the others go on without it."""
        return self.launch.elastic and self.handler is not None and not self.is_host

    def goes_on(self) -> bool:
        """Whether the run goes on without a machine that was asked to stop."""
        store = self.store
        if not self.launch.elastic or store is None:
            return False
        with contextlib.suppress(TimeoutError, RuntimeError, RendezvousError, PlaitError, Apart):
            return not self.patiently(lambda: store.check(["stopped"]), GOODBYE)
        return False

    def leave(self, machines: int) -> None:
        """Say that this machine's ranks have ended. Whoever holds the store leaves last: it waits some seconds for all
        `machines` to say so."""
        handler = self.handler
        assert handler is not None

        def ended() -> None:
            assert self.store is not None
            key = f"ended/{handler.round()}"
            self.store.add(key, 1)
            if self.launch.elastic and STOP_SIGNALS.number is not None and not self.is_host:
                handler.depart()
            while self.is_host and self.store.add(key, 0) < machines and not self._left.is_set():
                time.sleep(0.05)

        with contextlib.suppress(TimeoutError, RuntimeError, RendezvousError, PlaitError, Apart):
            self.patiently(ended, GOODBYE)

    def close(self) -> None:
        """After the last rendezvous; spares learn of it."""
        handler = self.handler
        assert handler is not None
        with contextlib.suppress(TimeoutError, RuntimeError, RendezvousError, PlaitError, Apart):
            self.patiently(handler.shutdown, GOODBYE)

    def refuse(self, sentence: str) -> None:
        """Tell the other machines that this one refuses the run, if they come in time."""

        def tell() -> None:
            while self.store is None:
                if self._left.wait(0.05):
                    return
            if self.launch.elastic and self.store.check(["begun"]):  # the others train without this machine
                return
            self.store.compare_set("refused", "", f"{self.name} refuses the run: {sentence}")
            self._wait_for_readers()

        if self.refusal is None:
            thread = self._begin(tell)
            thread.join(1)
            if thread.is_alive():
                self.say(f"telling the other machines, for up to {LAST_WORDS:g} s: {sentence}")
                thread.join(LAST_WORDS)

    def _wait_for_readers(self) -> None:
        with contextlib.suppress(RuntimeError):
            while self.is_host and self.store is not None and self.store.add("refused/read", 0) < self.launch.most:
                if self._left.wait(0.05):
                    return

    def _check(self) -> None:
        """Raises PlaitError if another machine refuses the run, Apart if the store's has not answered for long."""
        if self.refusal is not None:
            self._begin(self._wait_for_readers).join(GOODBYE)
            raise PlaitError(self.refusal)
        if self.store is not None and time.monotonic() > self._answered + max(self.launch.rendezvous_seconds, GIVEN_UP):
            self._broken = time.monotonic()
            raise self.apart()

    # --- words

    @property
    def _endpoint(self) -> str | None:
        return self.launch.rdzv_endpoint

    @property
    def _holder(self) -> str:
        return f"the machine of launch.rdzv_endpoint={self._endpoint}"

    def apart(self, error: BaseException | None = None) -> Apart:
        where, seconds = f"launch.rdzv_endpoint={self._endpoint}", self.launch.rendezvous_seconds
        limit, about = f"launch.rendezvous_seconds={seconds:g}", ("launch.rdzv_endpoint", self._endpoint)
        if self.handler is not None and self._broken is not None:
            again = "give the command again on all machines"
            return Apart(f"{self._holder} is gone, and the others cannot meet without it: {again}", *about)
        if self.store is None:
            own = towards(self.host, self.port)
            here = f"has the address {own}" if own else "finds no way there"
            return Apart(
                f"the machines did not meet at {where} within {limit}: {self.trouble}; the machine with this name or "
                f"address must run the same command, and this one, {self.name}, {here}",
                *about,
            )
        if error is None or isinstance(error, RendezvousTimeoutError):
            here = ", ".join(self.handler.names() if self.handler is not None else [self.name])
            missing = f"fewer than {self.counts[0]}" if self.launch.elastic else "not all"
            met = f"within {limit} {missing} of launch.nnodes={self.launch.nnodes} machines met at {where}"
            return Apart(f"{met}, only {here}", "launch.rendezvous_seconds", seconds)
        return Apart(f"the machines did not meet at {where}: {one_line(error.__cause__ or error)}", *about)
