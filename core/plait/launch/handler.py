"""torch elastic's rendezvous of several machines, with their names, and rank 0 on the machine that holds the store.

Needs `_state_holder`, `_this_node` and `_stop_heartbeats` of `DynamicRendezvousHandler`, in torch 2.11 to 2.13. Test:
tests/launch/test_ranks_meet.py.
"""

import datetime
import math
import time
from typing import Any

from torch.distributed import PrefixStore, Store
from torch.distributed.elastic.rendezvous import RendezvousGracefulExitError, RendezvousInfo
from torch.distributed.elastic.rendezvous.api import RendezvousStoreInfo
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler, RendezvousTimeout

from plait.contract.config import Launch

BEAT, MISSED = 5, 3  # seconds between two signs of life, and how many may be missing
SILENT = float(BEAT * MISSED)


class _Backend(C10dRendezvousBackend):
    """left: this machine no longer takes part; a rendezvous that it waits for then ends."""

    left = False

    def get_state(self) -> Any:
        if self.left:
            raise RendezvousGracefulExitError
        return super().get_state()

    def set_state(self, state: bytes, token: Any = None) -> Any:
        if self.left:
            raise RendezvousGracefulExitError
        return super().set_state(state, token)


class MeetingHandler(DynamicRendezvousHandler):
    """members: the machines of the current start of the ranks, None before they have met. met: whether they ever have.

    Everything that asks the store is called on a thread that may wait.
    """

    @classmethod
    def of(
        cls, store: Store, run: str, launch: Launch, address: str, name: str, is_host: bool, notes: Store
    ) -> "MeetingHandler":
        """address: where the others reach this machine. notes: the part of the store for Plait's own keys."""
        join = datetime.timedelta(seconds=max(math.ceil(launch.rendezvous_seconds), 1))
        backend = _Backend(store, run)
        handler = cls.from_backend(
            *(run, store, backend, launch.nnodes, launch.nnodes, address, RendezvousTimeout(join)),
            keep_alive_interval=BEAT,
            keep_alive_max_attempt=MISSED,
        )
        handler._notes, handler._names, handler.members, handler.met = notes, {}, None, False
        handler._waiting, handler._beats, handler._looked, handler._silent = 0, {}, time.monotonic(), []
        handler._backend = backend
        notes.set(f"name/{handler._this_node!r}", name)
        if is_host:
            notes.set("holder", repr(handler._this_node))
        return handler

    _notes: Store
    _names: dict[Any, str]
    _backend: _Backend
    _waiting: int
    _beats: dict[Any, tuple[Any, float]]  # machine -> its last sign of life, and when this machine saw it
    _looked: float
    _silent: list[str]
    members: set[Any] | None
    met: bool

    def leave(self) -> None:
        self._backend.left = True
        self._stop_heartbeats()

    def next_rendezvous(self) -> RendezvousInfo:
        """torch's, with the machines in another order: the endpoint's comes first, whose user sees the progress."""
        self._waiting, self._silent = 0, []
        info = super().next_rendezvous()
        ranks = self._state_holder.state.participants
        holder = self._notes.get("holder").decode()
        first = next((rank for node, rank in ranks.items() if repr(node) == holder), 0)
        rank = (info.rank - first) % info.world_size
        ordered = PrefixStore("ordered", info.store)
        where = RendezvousStoreInfo.build(rank, ordered, self._this_node.addr)
        self._beats = {}
        self.members, self.met = set(ranks), True
        return RendezvousInfo(info.store, rank, info.world_size, where)

    def look(self) -> None:
        """Ask the store who is there. Raises RendezvousError or RuntimeError if it cannot be reached."""
        if self.members is not None:
            self._waiting = super().num_nodes_waiting()
            self._note_beats(self.members)
        for node in self._present():
            if node not in self._names and self._notes.check([f"name/{node!r}"]):
                self._names[node] = self._notes.get(f"name/{node!r}").decode()

    def _note_beats(self, members: set[Any]) -> None:
        """By this machine's clock alone, because clocks differ."""
        now, beats = time.monotonic(), {**self._state_holder.state.last_heartbeats}
        if now - self._looked > BEAT:  # this process was stopped for some time, and has no right to judge
            self._beats = {}
        self._looked = now
        for node in members:
            last, seen = self._beats.get(node, (None, now))
            self._beats[node] = (beats[node], now) if beats.get(node, last) != last else (last, seen)
        silent = [node for node in members if now - self._beats[node][1] > SILENT and node != self._this_node]
        self._silent = [self._names.get(node, node.addr) for node in sorted(silent)]

    def num_nodes_waiting(self) -> int:
        return self._waiting

    def _present(self) -> list[Any]:
        state = self._state_holder.state
        return sorted({*list(state.participants), *list(state.wait_list)})

    def names(self) -> list[str]:
        """Of the machines that train or wait to."""
        return [self._names.get(node, node.addr) for node in self._present()]

    def gone(self) -> list[str]:
        """The names of the machines with which the ranks were started, and that give no sign of life."""
        return self._silent if self.members is not None else []

    def is_spare(self) -> bool:
        return self._this_node in self._state_holder.state.redundancy_list

    def round(self) -> int:
        return self._state_holder.state.round
