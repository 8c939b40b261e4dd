"""Who compiles: a rank that compiles makes progress, and so does one that waits for it.

torch tells a rank when it begins and ends to compile a graph. A rank that compiles counts up a number in the ranks'
store, now and then; a rank that waits sees the number grow.
"""

import logging
import math
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from plait.system.torch_internals.compiler import progress
from plait.system.torch_internals.groups import default_store

LINE_SECONDS = 10.0  # a graph that compiles for longer is said; also how often the store is asked
ANSWER_SECONDS = 5.0  # for which the store may keep us waiting
KEY = "plait/compiling"

log = logging.getLogger("plait")


class Compiling:
    """What this rank, and the others, compile.

    Watch from one thread by `look`. timeout_seconds: of the watchdog. say(text): a line, once for each rank waited for.
    """

    def __init__(self, timeout_seconds: float, say: Callable[[str], None]) -> None:
        self.every = min(LINE_SECONDS, timeout_seconds / 8)
        self.say = say
        self.since: float | None = None  # when the graph that compiles now was begun
        self._ended = -math.inf  # when one was compiled last
        self._looked, self._told, self._count = time.monotonic(), False, -1
        self._named = ""  # the rank that was said to compile
        self._store: Any = None
        self._asking: threading.Thread | None = None
        self._handler: Any = None

    def listen(self) -> None:
        """Hear from torch's compiler, if it has been imported: importing it takes seconds."""
        handler = progress()
        if self._handler is None and handler is not None:
            self._handler = handler
            handler.register_start_callback(self._begins)
            handler.register_end_callback(self._ends)

    def close(self) -> None:
        if self._handler is not None:
            handler, self._handler = self._handler, None
            if self._begins in handler.start_callbacks:  # `torch._dynamo.reset` forgets them
                handler.remove_start_callback(self._begins)
                handler.remove_end_callback(self._ends)

    def _begins(self, about: object) -> None:
        self._told, self.since = False, time.monotonic()

    def _ends(self, about: object) -> None:
        self.since, self._ended = None, time.monotonic()

    def look(self, silent_since: float) -> float:
        """When a rank was last seen to compile, a time of `time.monotonic`; silent_since: this one's last progress.

        Asks or tells the store if it is time for that, which takes `ANSWER_SECONDS` at most.
        """
        now, since = time.monotonic(), self.since
        last = self._ended if since is None else now
        if since is not None and not self._told and now - since >= LINE_SECONDS:
            self._told = True
            log.info(f"rank {_rank()} has compiled a graph for {now - since:.0f} s; others may wait for it")
        if now - self._looked < self.every:
            return last
        if last > self._looked:
            self._count = -1  # as last seen, it lacks what this rank adds
            self._answer(self._tell)
        elif now - silent_since < self.every:
            self._count = -1  # nobody is waited for
        elif (answer := self._answer(self._ask)) is not None:
            count, rank = answer
            if -1 < self._count < count:
                last = now
                if rank not in (self._named, _rank()):
                    self._named = rank
                    self.say(f"waiting for rank {rank}, which compiles")
            self._count = count
        self._looked = now
        return last

    def _answer(self, call: Callable[[], Any]) -> Any:
        """What `call` returns; None if it fails or takes too long: a machine that is off does not answer for
        minutes."""
        answers: list[Any] = []

        def ask() -> None:
            try:
                answers.append(call())
            except Exception as error:
                log.info(f"the ranks' store does not say who compiles: {error}")

        if self._asking is None or not self._asking.is_alive():
            self._asking = threading.Thread(target=ask, name="plait-compiling", daemon=True)
            self._asking.start()
            self._asking.join(ANSWER_SECONDS)
        return next(iter(answers), None)

    def _tell(self) -> None:
        store = self._group_store()
        if store is not None:
            store.set(f"{KEY}/rank", _rank())
            store.add(KEY, 1)

    def _ask(self) -> tuple[int, str]:
        """(How often ranks said that they compile, the last of them)."""
        store = self._group_store()
        count = 0 if store is None else store.add(KEY, 0)
        return count, store.get(f"{KEY}/rank").decode() if count else ""

    def _group_store(self) -> Any:
        """The store of the ranks, by a connection of its own: another thread may wait for a key on theirs."""
        if self._store is None:
            c10d = sys.modules.get("torch.distributed.distributed_c10d")
            if c10d is not None and c10d.is_initialized() and c10d.get_world_size() > 1:
                self._store = default_store().clone()
        return self._store


def _rank() -> str:
    return os.environ.get("RANK", "0")
