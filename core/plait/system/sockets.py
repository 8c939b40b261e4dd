"""Who can reach a run: on one machine, nobody, because its sockets listen on loopback alone, and its store is a file;
on several, whoever reaches the interface between them."""

import datetime
import os
import socket
from typing import TYPE_CHECKING

from plait.contract.errors import PlaitError
from plait.system.addresses import interface_of, is_loopback, towards

if TYPE_CHECKING:
    from torch.distributed import Store

_STORES: "dict[int, Store]" = {}  # of this process, by port: for all groups that it starts, one after the other
STORE = "PLAIT_STORE"  # the file, without its suffix, that Plait's launcher names for the ranks' store


def one_machine() -> bool:
    """Whether all ranks run on this machine, according to their launcher. A process without a launcher is alone."""
    env = os.environ
    return not {"RANK", "WORLD_SIZE"} <= env.keys() or env.get("LOCAL_WORLD_SIZE") == env["WORLD_SIZE"]


def listen_on_loopback() -> None:
    """Make gloo and nccl open their sockets on the loopback interface, unless the user set these variables."""
    names = {name for _, name in socket.if_nameindex()}
    _listen_on(next((name for name in ("lo", "lo0") if name in names), None))


def listen_to_other_machines(store: "Store", rank: int, world: int) -> None:
    """Make them open their sockets on the interface that leads to the other machines, unless the user set these
    variables.

    They would take the address of this machine's own name, or any. The way to rank 0 shows the interface; on rank 0's
    machine, whose name may be loopback there, the way back does.
    """
    port = int(os.environ["MASTER_PORT"])
    own = towards(os.environ["MASTER_ADDR"], port)
    store.set(f"plait/address/{rank}", own or "")
    if own is not None and is_loopback(own):
        every = (store.get(f"plait/address/{other}").decode() for other in range(world))
        back = next((each for each in every if each and not is_loopback(each)), own)
        own = towards(back, port)
    _listen_on(interface_of(own) if own is not None else None)


def _listen_on(interface: str | None) -> None:
    """Both read the variables for every group that they create, so they stay set."""
    if interface is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")  # without "=", nccl takes it as a prefix


def local_store(timeout: datetime.timedelta) -> "Store | None":
    """The store of the ranks on one machine; None if their launcher has one for them, or if there are several machines.

    A store decides what ranks send each other and where they connect, so others must not reach it. Plait's launcher
    gives its ranks a file in a folder that only this user can read: a new one after every restart, because keys of a
    dead group would confuse the next. Under Slurm rank 0 holds a store that listens on loopback. Raises PlaitError if
    MASTER_PORT is taken.
    """
    from torch.distributed import FileStore, TCPStore

    env = os.environ
    rank, world, file = int(env["RANK"]), int(env["WORLD_SIZE"]), env.pop(STORE, None)
    if file is not None:  # no user count: a store that counts users removes the file when one of them leaves
        store: Store = FileStore(f"{file}-{env.get('TORCHELASTIC_RESTART_COUNT', '0')}")
        store.set_timeout(timeout)
        return store
    if not one_machine() or env.get("TORCHELASTIC_USE_AGENT_STORE") == str(True):
        return None
    port = int(env["MASTER_PORT"])
    if port in _STORES:  # a job of a sweep has begun here before, and its store listens still
        _STORES[port].set_timeout(timeout)
        return _STORES[port]
    listener = None
    if rank == 0:
        try:
            listener = socket.create_server(("127.0.0.1", port)).detach()
        except OSError as error:
            raise PlaitError(f"MASTER_PORT={port} cannot be listened on: {os.strerror(error.errno or 0)}").at(
                "MASTER_PORT", port
            ) from None
    _STORES[port] = TCPStore("127.0.0.1", port, world, rank == 0, timeout, master_listen_fd=listener)
    return _STORES[port]
