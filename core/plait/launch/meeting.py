"""The machines of one run: how their launchers find each other, what they tell each other, and which one is lost.

They share torch's store, which the machine of `launch.rdzv_endpoint` holds; in an elastic run another takes its place
if it is lost. The main thread must hear signals, so it leaves all calls that may wait to others.
"""

import contextlib
import math
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from signal import SIGINT
from typing import Any, TypeVar

from torch.distributed import DistError
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousError,
    RendezvousGracefulExitError,
    RendezvousTimeoutError,
)

from plait.contract.config import Launch
from plait.contract.errors import PlaitError
from plait.launch.connection import Connection
from plait.launch.external import meeting_point
from plait.launch.handler import GIVEN_UP, SILENT, MeetingHandler
from plait.launch.hosting import Hosting
from plait.system.addresses import is_here, towards
from plait.system.errors import one_line
from plait.system.signals import STOP_SIGNALS

T = TypeVar("T")

FIRST_LINE, LINES = 5.0, 30.0  # seconds of waiting before the first line, and between others
LAST_WORDS = 15.0  # seconds for which a machine that refuses waits for others, to tell them
GOODBYE = 5.0  # seconds for which the machines wait for each other at the end
FOLDER_SILENT = 30.0  # seconds; file systems take locks from a machine only later


class Apart(Exception):
    """The machines did not meet, or the machine that holds the store is gone. about: for `PlaitError.at`."""

    def __init__(self, sentence: str, *about: Any) -> None:
        super().__init__(sentence)
        self.about = about


class Over(Apart):
    """The run ended without this machine, which was a spare."""


class _Gone(Apart):
    """The machine that holds the store is gone, and another may take its place."""


class Meeting:
    """This machine's part. It listens, or looks for the machine that does, from the start.

    Raises PlaitError if the endpoint is impossible, or its port is another program's.
    """

    def __init__(self, launch: Launch, folder: Path, say: Callable[[str], None]) -> None:
        self.launch, self.run, self.say = launch, str(launch.run_id or folder.name), say
        host, _, port = meeting_point(launch).rpartition(":")
        self.name = socket.gethostname()
        self.counts: Sequence[int] = launch.machines  # how many machines may train
        self.changed = False  # whether other machines met for this start of the ranks than for the one before
        self._silent, self._asked, self._spare, self._lost = 0.0, time.monotonic(), False, ""
        self._left, self._threads = threading.Event(), list[threading.Thread]()
        self._hosting, self._leaves = Hosting(folder), False
        host = host.strip("[]")
        self._at = self._connection(host, int(port), own=host if is_here(host, int(port)) else "")
        self._watch()

    def _connection(self, host: str, port: int, **may: Any) -> Connection:
        until = time.monotonic() + self.launch.rendezvous_seconds
        return Connection(self.run, host, port, until, self._hosting, **may)

    def _watch(self) -> None:
        self._begin(self._at.watch)
        self._begin(self._at.guard)

    @property
    def handler(self) -> MeetingHandler | None:
        return self._at.handler

    @property
    def address(self) -> str:
        """Where the others reach this machine, once it has joined them."""
        return self.handler.address if self.handler is not None else ""

    def __enter__(self) -> "Meeting":
        return self

    def __exit__(self, *_: object) -> None:
        """End the threads, if they do not wait for a machine that is off: none may be inside torch when Python ends."""
        deadline = time.monotonic() + GOODBYE
        self._begin(lambda: self._hosting.end(goes_on=self._leaves)).join(GOODBYE)
        for event in (self._left, self._at.left):
            event.set()
        if self.handler is not None:
            self._begin(self.handler.leave)
        for thread in self._threads:
            thread.join(max(deadline - time.monotonic(), 0))

    def _begin(self, work: Callable[[], object]) -> threading.Thread:
        thread = threading.Thread(target=work, daemon=True)
        self._threads = [each for each in self._threads if each.is_alive()]
        self._threads.append(thread)
        thread.start()
        return thread

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

        def meet() -> MeetingHandler | None:
            own = at.address()
            if own is None:
                return None
            assert at.store is not None
            return MeetingHandler.of(
                *(at.whole, self.run, self.launch, own, self.name, at.is_host, at.store, self.counts)
            )

        while (at := self._at).handler is None:
            error = None
            try:
                at.handler = self.patiently(meet, line=self._line)
            except (DistError, RendezvousError) as lost:  # the machine that holds the store has just left
                error = lost
                self._left.wait(1.0)
            if at.handler is None:
                if not self._hosting.proven or at.store is None or at.broken is None:
                    raise self.apart(error) from None
                self._connect_again(at.own)  # it is lost, and another may hold the store
        return at.handler

    def rendezvous(self, work: Callable[[], T]) -> T:
        """Meet, by `work`, again and again while a machine is lost as the others meet; if it is the one that holds the
        store of an elastic run, where another holds it then. Returns what `work` returns.

        Raises Over, or Apart if the machines did not meet in time or the store's machine is gone.
        """
        handler, began = self.join(), time.monotonic()
        before, names = handler.members, handler.known
        handler.members = None
        while True:
            try:
                met = self.patiently(work, line=self._line)
                self._check_held()
                self._say_who_changed(before, names)
                return met
            except (RendezvousGracefulExitError, RendezvousClosedError):
                raise self._over() from None
            except (RendezvousError, DistError, _Gone) as error:
                handler = self.join()
                if isinstance(error, RendezvousTimeoutError) and handler.trains_without():
                    began = time.monotonic()
                    continue
                if not isinstance(error, _Gone | RendezvousTimeoutError):
                    self._left.wait(1.0)  # if the store's machine is gone, the connection knows by then
                if self._is_gone():
                    self._move()
                    began = time.monotonic()
                    continue
                if handler.is_spare():  # whoever holds the store may be gone before it has read that the run ended
                    raise self._over() from None
                late = time.monotonic() - began > self.launch.rendezvous_seconds
                if late or self._at.broken is not None or isinstance(error, RendezvousError):
                    raise self.apart(error) from None
                self.say("a machine was lost while the machines met; they meet again")

    def _is_gone(self) -> bool:
        """Whether the machine that holds the store is gone, and another may take its place, or it itself comes back."""
        at = self._at
        if at.is_host or not self._hosting.proven or at.handler is None:
            return False
        return at.broken is not None or time.monotonic() > at.answered + SILENT

    def _move(self) -> None:
        """Find the machine that holds the store now, or hold it here if the run is elastic. Raises Apart if neither
        goes."""
        handler = self.join()
        spare = handler.is_spare()
        self._begin(handler.leave)
        self._connect_again(handler.address if self.launch.elastic else "")
        try:
            self.join()
        except Apart:
            if spare:
                raise self._over() from None
            raise
        if self._at.is_host:
            self.say(f"{self.name} holds the store now, in the place of {self._lost}")

    def _connect_again(self, own: str) -> None:
        """own: where others reach this machine, if it may hold the store."""
        old, self._lost = self._at, self._holder
        old.left.set()
        self._at = self._connection(old.host, old.port, again=True, own=own)
        self._watch()

    def _check_held(self) -> None:
        """Before ranks start beside the store, the folder must say that it is still here. Raises Apart if not."""
        at = self._at
        if at.is_host:
            line = "waiting for the run's folder, which does not answer"
            at.taken |= not self.patiently(self._hosting.is_own, line=lambda: line)
            self._check()

    def _say_who_changed(self, before: set[Any] | None, names: Mapping[Any, str]) -> None:
        """before: the machines of the last start, None for the first. names: theirs."""
        handler = self.handler
        assert handler is not None
        now = handler.members or set()
        self.changed = before is not None and now != before
        if not self.launch.elastic or not (self.changed or before is None):
            return
        ours = {handler.name_of(node) for node in now}
        theirs = {names.get(node, node.addr) for node in before or ()}
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
        at = self._at
        if at.store is None:
            if at.own and at.again:
                return f"waiting for the machine that holds the store now: {at.trouble}"
            return f"waiting for the machine {at.host} at {self._where}: {at.trouble}"
        if (silent := time.monotonic() - at.answered) > FIRST_LINE:
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
        if self.handler is None and at.is_host:
            return f"waiting for another machine: {self._where} is loopback here, and only an address could begin alone"
        if self.handler is None:
            return f"waiting for {self._holder}, which checks the run"
        return f"waiting for {' and '.join(name for name in here if name != self.name) or 'others'}, to begin together"

    # --- while ranks run

    def lost(self) -> str | None:
        """What to say of machines that have not answered for some time; None if all have.

        Raises Apart if the store's machine closed the connection, but ranks still run some seconds later.
        """
        at, now = self._at, time.monotonic()
        self._silent += min(now - self._asked, 1.0)  # not more: this process may have been stopped
        self._asked = now
        self._check_taken()
        if at.broken is not None:
            if now <= at.broken + GOODBYE:
                return None
            if self._is_gone():
                return f"{self._holder} is gone"
            raise self.apart()
        if now - at.answered < 2.0:
            self._silent = 0.0
        if self._silent > SILENT:
            self._silent = 0.0
            return f"{self._holder} has not answered for {SILENT:g} s"
        if self._hosting.held and at.handler is not None:
            alone = at.handler.members is not None and len(at.handler.members) == 1
            if alone and now > self._hosting.seen + FOLDER_SILENT:
                return f"the run's folder has not answered for {FOLDER_SILENT:g} s"
        return self.silent()

    def silent(self) -> str | None:
        """What to say of machines with which the ranks were started, and that give no sign of life; None if all do."""
        if self.handler is None or not (gone := self.handler.gone()):
            return None
        return f"{' and '.join(gone)} {'has' if len(gone) == 1 else 'have'} not answered for {SILENT:g} s"

    def others_come(self) -> bool:
        """Whether ranks must start again because machines wait to take part."""
        return self.handler is not None and self.handler.waiting > 0

    # --- the end

    def says_stop(self, number: int) -> None:
        """Signal `number` ends the run on all machines, if this one does not only leave it."""
        store = self._at.store
        if not self.leaves(number) and self._at.is_host and store is not None:
            self._begin(lambda: store.set("stopped", "1")).join(1)

    def leaves(self, number: int) -> bool:
        """Whether signal `number` to this machine lets the others go on without it. Ctrl-C where the store is, and the
        progress is shown, ends the run."""
        heir = not self._at.is_host or (self._at.has_heir and number != SIGINT)
        self._leaves = self.launch.elastic and self.handler is not None and heir
        return self._leaves

    def goes_on(self) -> bool:
        """Whether the run goes on without a machine that was asked to stop."""
        store, handler = self._at.store, self.handler
        if not self.launch.elastic or store is None or handler is None:
            return False

        def told() -> bool:
            if store.check(["stopped"]):
                return False
            store.add(f"ended/{handler.round()}", 1)  # for the machine that holds the store, if it leaves
            return True

        with contextlib.suppress(TimeoutError, RuntimeError, RendezvousError, PlaitError, Apart):
            return self.patiently(told, GOODBYE)
        self._left.wait(1.0)  # if the store's machine is gone, the connection knows by then
        return self._is_gone()

    def leave(self, machines: int) -> None:
        """Say that this machine's ranks have ended. Whoever holds the store leaves last: it waits some seconds for all
        `machines` to say so."""
        at, handler = self._at, self.handler
        assert handler is not None

        def ended() -> None:
            assert at.store is not None
            key = f"ended/{handler.round()}"
            at.store.add(key, 1)
            if self.launch.elastic and STOP_SIGNALS.number is not None and not at.is_host:
                handler.depart()
            while at.is_host and at.store.add(key, 0) < machines and not self._left.is_set():
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

        at = self._at

        def tell() -> None:
            while at.store is None:
                if self._left.wait(0.05):
                    return
            if self.launch.elastic and at.store.check(["begun"]):  # the others train without this machine
                return
            at.store.compare_set("refused", "", f"{self.name} refuses the run: {sentence}")
            self._wait_for_readers()

        if at.refusal is None:
            thread = self._begin(tell)
            thread.join(1)
            if thread.is_alive():
                self.say(f"telling the other machines, for up to {LAST_WORDS:g} s: {sentence}")
                thread.join(LAST_WORDS)

    def _wait_for_readers(self) -> None:
        at = self._at
        with contextlib.suppress(RuntimeError):
            while at.is_host and at.store is not None and at.store.add("refused/read", 0) < self.launch.most:
                if self._left.wait(0.05):
                    return

    def _check(self) -> None:
        """Raises PlaitError if another machine refuses the run, Apart if the store's has not answered for long."""
        at = self._at
        self._check_taken()
        if at.refusal is not None:
            self._begin(self._wait_for_readers).join(GOODBYE)
            raise PlaitError(at.refusal)
        if self._is_gone():
            raise _Gone(f"{self._holder} is gone")
        if at.store is not None and time.monotonic() > at.answered + max(self.launch.rendezvous_seconds, GIVEN_UP):
            at.broken = time.monotonic()
            raise self.apart()

    def _check_taken(self) -> None:
        if self._at.taken:
            again = f"give the command again on {self.name}"
            raise Apart(f"another machine holds the store of this run now: {again}", "launch.rdzv_endpoint")

    # --- words

    @property
    def _where(self) -> str:
        return f"launch.rdzv_endpoint={self.launch.rdzv_endpoint}"

    @property
    def _holder(self) -> str:
        return (self.handler and self.handler.holder) or f"the machine of {self._where}"

    def apart(self, error: BaseException | None = None) -> Apart:
        at, where, seconds = self._at, self._where, self.launch.rendezvous_seconds
        limit, about = f"launch.rendezvous_seconds={seconds:g}", ("launch.rdzv_endpoint", self.launch.rdzv_endpoint)
        if at.broken is not None and (self.handler is not None or at.again):
            lost = self._holder if self.handler is not None else self._lost
            again = "give the command again on all machines"
            return Apart(f"{lost} is gone, and the others cannot meet without it: {again}", *about)
        if at.store is None:
            own = towards(at.host, at.port)
            here = f"has the address {own}" if own else "finds no way there"
            return Apart(
                f"the machines did not meet at {where} within {limit}: {at.trouble}; the machine with this name or "
                f"address must run the same command, and this one, {self.name}, {here}",
                *about,
            )
        if error is None or isinstance(error, RendezvousTimeoutError):
            here = ", ".join(self.handler.names() if self.handler is not None else [self.name])
            missing = f"fewer than {self.counts[0]}" if self.launch.elastic else "not all"
            met = f"within {limit} {missing} of launch.nnodes={self.launch.nnodes} machines met at {where}"
            return Apart(f"{met}, only {here}", "launch.rendezvous_seconds", seconds)
        return Apart(f"the machines did not meet at {where}: {one_line(error.__cause__ or error)}", *about)
