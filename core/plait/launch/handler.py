"""torch elastic's rendezvous of several machines, with their names, and rank 0 on the machine that holds the store.

Needs `_state_holder`, `_this_node`, `_op_executor`, `_heartbeat_lock` and `_stop_heartbeats` of
`DynamicRendezvousHandler`, `_sanitize` and `_cache_duration` of its state's holder, `_RendezvousExitOp` and `_delay`,
in torch 2.11 to 2.15.
Test: tests/launch/test_ranks_meet.py.
"""

import contextlib
import datetime
import logging
import math
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torch.distributed import PrefixStore, Store
from torch.distributed.elastic.rendezvous import RendezvousGracefulExitError, RendezvousInfo, dynamic_rendezvous
from torch.distributed.elastic.rendezvous.api import RendezvousStoreInfo
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    DynamicRendezvousHandler,
    RendezvousTimeout,
    _BackendRendezvousStateHolder,
    _RendezvousExitOp,
)

from plait.contract.config import Launch

BEAT = 1  # seconds between two signs of life
SILENT = 5.0  # seconds without one, by this machine's clock, after which another counts as lost
GIVEN_UP = 15  # seconds without one after which torch waits for it no more
PAUSE = 3.0  # seconds for which machines that are enough wait for more, so that several cause one restart


class _Backend(C10dRendezvousBackend):
    """left: this machine no longer takes part; a rendezvous that it waits for then ends."""

    left = False

    def get_state(self) -> Any:
        state = None if self.left else super().get_state()
        if self.left:  # meanwhile, perhaps
            raise RendezvousGracefulExitError
        return state

    def set_state(self, state: bytes, token: Any = None) -> Any:
        if self.left:
            raise RendezvousGracefulExitError
        return super().set_state(state, token)


class _StateHolder(_BackendRendezvousStateHolder):
    """Who gives no sign of life for long, by this machine's clock, is removed. torch compares the clocks of two
    machines, which then never meet if these are further apart than that."""

    seen: dict[Any, tuple[Any, float]]  # machine -> its last sign of life, and when this machine saw it

    def _sanitize(self) -> None:
        beats, now = self._state.last_heartbeats, time.monotonic()
        before = {node: self.seen.get(node, (None, now)) for node in beats}
        self.seen = {node: (beat, before[node][1] if before[node][0] == beat else now) for node, beat in beats.items()}
        here = datetime.datetime.now(datetime.UTC)
        ages = {node: datetime.timedelta(seconds=now - since) for node, (_, since) in self.seen.items()}
        self._state.last_heartbeats = {node: here - age for node, age in ages.items()}
        super()._sanitize()
        self._state.last_heartbeats = {node: beats[node] for node in self._state.last_heartbeats}


@contextlib.contextmanager
def _short_pauses(holder: Any) -> Iterator[None]:
    """Inside, torch does not wait for a second before it looks again whether the others are there, but, at first, for
    some milliseconds: ranks that start again are there at once. holder: of the state, which would not ask the store
    more than once a second."""
    began, before = time.monotonic(), dynamic_rendezvous._delay

    def pause(seconds: float | tuple[float, float]) -> None:
        time.sleep(min(0.01 + (time.monotonic() - began) / 20, 1.0))

    dynamic_rendezvous._delay = pause
    seconds, holder._cache_duration = holder._cache_duration, 0
    try:
        yield
    finally:
        dynamic_rendezvous._delay, holder._cache_duration = before, seconds


class MeetingHandler(DynamicRendezvousHandler):
    """members: the machines of the current start of the ranks, None before they have met. met: whether they ever have.
    counts: how many machines may train, rising; of those that met, others are spares. known: machine -> its name.
    holder: the name of the one that holds the store, once met. waiting: machines for which the ranks must start again.

    Everything that asks the store is called on a thread that may wait.
    """

    @classmethod
    def of(
        cls,
        store: Store,
        run: str,
        launch: Launch,
        address: str,
        name: str,
        is_host: bool,
        notes: Store,
        counts: Sequence[int],
    ) -> "MeetingHandler":
        """address: where the others reach this machine. notes: the part of the store for Plait's own keys."""
        join = datetime.timedelta(seconds=max(math.ceil(launch.rendezvous_seconds), 1))
        backend, limits = _Backend(store, run), RendezvousTimeout(join, datetime.timedelta(seconds=PAUSE))
        handler = cls.from_backend(
            *(run, store, backend, counts[0], launch.most, address, limits),
            keep_alive_interval=BEAT,
            keep_alive_max_attempt=GIVEN_UP // BEAT,
        )
        handler._state_holder.__class__, handler._state_holder.seen = _StateHolder, {}
        handler._notes, handler.known, handler.members, handler.met = notes, {}, None, False
        handler.address, handler.holder = address, ""
        handler.waiting, handler._beats, handler._looked, handler._silent = 0, {}, time.monotonic(), []
        handler._backend, handler._counts, handler._idle, handler._since = backend, counts, False, None
        notes.set(f"name/{handler._this_node!r}", name)
        if is_host:
            notes.set("holder", repr(handler._this_node))
        return handler

    _notes: Store
    _backend: _Backend
    _beats: dict[Any, tuple[Any, float]]  # machine -> its last sign of life, and for how long there has been no other
    _looked: float
    _silent: list[str]
    _counts: Sequence[int]
    _idle: bool  # whether this machine met the others, but is not one of those that train
    _since: float | None  # when enough machines waited to take part
    address: str
    known: dict[Any, str]
    holder: str
    waiting: int
    members: set[Any] | None
    met: bool

    def leave(self) -> None:
        self._backend.left, self.waiting = True, 0
        dynamic_rendezvous.logger.setLevel(logging.CRITICAL)  # a store that is off may fail a call minutes later
        self._stop_heartbeats()

    def next_rendezvous(self) -> RendezvousInfo:
        """torch's, with the machines in another order: the endpoint's comes first, whose user sees the progress."""
        self.waiting, self._silent, self._since = 0, [], None
        holder = self._notes.get("holder").decode()
        while True:
            with _short_pauses(self._state_holder):
                info = super().next_rendezvous()
            ranks = {**self._state_holder.state.participants}
            first = next((rank for node, rank in ranks.items() if repr(node) == holder), 0)
            rank = (info.rank - first) % info.world_size
            world = self._fitting(info.world_size)
            training = {node for node, each in ranks.items() if (each - first) % info.world_size < world}
            self._learn_names(ranks)
            self.holder = next((self.name_of(node) for node in ranks if repr(node) == holder), "")
            if rank < world:
                break
            self._wait_in_reserve(training)
        if rank == 0:
            self._notes.set("begun", "1")
        ordered = PrefixStore("ordered", info.store)
        where = RendezvousStoreInfo.build(rank, ordered, self._this_node.addr)
        self._beats = {}
        self.members, self.met = training, True
        return RendezvousInfo(info.store, rank, world, where)

    def _fitting(self, machines: int) -> int:
        """The most of `machines` that may train; 0 if there are too few."""
        return max((count for count in self._counts if count <= machines), default=0)

    def _wait_in_reserve(self, training: set[Any]) -> None:
        """Until one of those that train leaves, or enough machines are there for more to train."""
        self._idle = True
        try:
            while True:
                waiting = super().num_nodes_waiting()
                state = self._state_holder.state
                if state.closed:
                    raise RendezvousGracefulExitError
                there = len(state.participants)
                if not training <= set(state.participants) or self._fitting(there + waiting) > len(training):
                    return
                time.sleep(0.5)
        finally:
            self._idle = False

    def offer(self) -> None:
        """Say that this machine may hold the store if the one that does leaves."""
        self._notes.set(f"may hold/{self._this_node!r}", "1")

    def has_heir(self) -> bool:
        """Whether another machine that takes part, or waits to, may hold the store."""
        others = [node for node in self._present() if node != self._this_node]
        return any(self._notes.check([f"may hold/{node!r}"]) for node in others)

    def depart(self) -> None:
        """Leave the machines that train: the others need not wait for signs of life."""
        self._stop_heartbeats()
        with self._heartbeat_lock:
            self._op_executor.run(_RendezvousExitOp(), time.monotonic() + SILENT)

    def look(self) -> None:
        """Ask the store who is there. Raises RendezvousError or RuntimeError if it cannot be reached."""
        if (members := self.members) is not None:  # another thread may set it to None now
            waiting = super().num_nodes_waiting()
            there = set(self._state_holder.state.participants)
            more = self._fitting(len(there) + waiting) > len(members & there)
            now = time.monotonic()
            self._since = (self._since or now) if waiting and more else None
            self.waiting = waiting if self._since is not None and now >= self._since + PAUSE else 0
            self._note_beats(members)
        self._learn_names(self._present())

    def _learn_names(self, nodes: Iterable[Any]) -> None:
        for node in nodes:
            if node not in self.known and self._notes.check([f"name/{node!r}"]):
                self.known[node] = self._notes.get(f"name/{node!r}").decode()

    def _note_beats(self, members: set[Any]) -> None:
        """By this machine's clock alone, because clocks differ. A late look counts for half of SILENT at most: this
        process may have been stopped, and on a busy machine each look may be late."""
        now, beats = time.monotonic(), {**self._state_holder.state.last_heartbeats}
        passed, self._looked = min(now - self._looked, SILENT / 2), now
        before, seen = self._beats, dict[Any, tuple[Any, float]]()
        for node in members:
            last, silent = before.get(node, (None, -passed))
            seen[node] = (beats[node], 0.0) if beats.get(node, last) != last else (last, silent + passed)
        if self.members is members:  # no other start of the ranks has begun meanwhile
            self._beats = seen
        gone = [node for node in members if seen[node][1] > SILENT and node != self._this_node]
        self._silent = [self.known.get(node, node.addr) for node in sorted(gone)]

    def num_nodes_waiting(self) -> int:
        return 0  # the agent asks `waiting`, of the handler of the current store

    def _present(self) -> list[Any]:
        state = self._state_holder.state
        return sorted({*list(state.participants), *list(state.wait_list)})

    def name_of(self, node: Any) -> str:
        return self.known.get(node, node.addr)

    def names(self) -> list[str]:
        """Of the machines that train or wait to."""
        return [self.name_of(node) for node in self._present()]

    def unfinished(self) -> list[str]:
        """Of the machines of the last start that have not left it: the next one waits for them."""
        state = self._state_holder.state
        others = state.participants if state.complete and self._this_node in state.wait_list else ()
        return [self.name_of(node) for node in sorted(others)]

    def gone(self) -> list[str]:
        """The names of the machines with which the ranks were started, and that give no sign of life."""
        return self._silent if self.members is not None else []

    def trains_without(self) -> bool:
        """Whether others train, and would not be more with this machine."""
        state = self._state_holder.state
        others = len(state.participants)
        waiting = len({*state.wait_list, self._this_node})
        return state.complete and others > 0 and self._fitting(others + waiting) <= self._fitting(others)

    def is_spare(self) -> bool:
        if self._this_node in self._state_holder.state.wait_list and self.trains_without():
            return True
        return self._idle or self._this_node in self._state_holder.state.redundancy_list

    def round(self) -> int:
        return self._state_holder.state.round
