"""The rendezvous of torch elastic's agent on a single machine: without a store that others could reach."""

import socket

from torch.distributed import HashStore
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo
from torch.distributed.elastic.rendezvous.api import RendezvousStoreInfo


class LocalHandler(RendezvousHandler):
    """The rendezvous of a run's only machine. What the agent stores stays in the memory of its process."""

    use_agent_store = False  # ranks have their own store: `plait.system.sockets.local_store`

    def __init__(self, run_id: str) -> None:
        self._run_id, self._closed = run_id, False

    def get_backend(self) -> str:
        return "plait-alone"

    def get_run_id(self) -> str:
        return self._run_id

    def next_rendezvous(self) -> RendezvousInfo:
        """A new store for each start of the ranks, because the keys of one would confuse the next."""
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]  # for MASTER_PORT; nothing of Plait's listens on it
        return RendezvousInfo(HashStore(), 0, 1, RendezvousStoreInfo("127.0.0.1", port))

    def is_closed(self) -> bool:
        return self._closed

    def set_closed(self) -> None:
        self._closed = True

    def num_nodes_waiting(self) -> int:
        return 0

    def shutdown(self) -> bool:
        self._closed = True
        return True
