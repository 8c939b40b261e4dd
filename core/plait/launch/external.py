"""Where the ranks that a launcher started meet, and the machines of `launch.rdzv_endpoint`."""

import contextlib
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator

from plait.contract.config import Launch
from plait.contract.errors import PlaitError, misfit
from plait.system.errors import one_line

LAST_PORT = 65535
PATIENCE = 10.0  # seconds without a line


@contextlib.contextmanager
def meeting_others(seconds: float, say: Callable[[str], None] | None) -> Iterator[None]:
    """Inside, the ranks that a launcher started meet. say: gets a line if that takes long.

    Raises PlaitError, on a rank that others leave alone for `seconds`.
    """
    import torch.distributed as dist

    env, met = os.environ, threading.Event()
    where = f"{env.get('WORLD_SIZE')} ranks at {env.get('MASTER_ADDR')}:{env.get('MASTER_PORT')}"

    def tell() -> None:
        while say is not None and not met.wait(PATIENCE) and not dist.is_initialized():
            say(f"launch: rank {env['RANK']} waits for the others of {where}")

    threading.Thread(target=tell, daemon=True, name="plait-meeting").start()
    try:
        yield
    except (dist.DistStoreError, dist.DistNetworkError) as error:
        if dist.is_initialized():
            raise
        raise PlaitError(
            f"not all of {where} came within {seconds:g} s (launch.rendezvous_seconds): start them all, and see that "
            f"this address is reached from each; torch says: {one_line(error)}"
        ).at("launch.rendezvous_seconds", seconds) from error
    finally:
        met.set()


def unused_number(launch: Launch) -> str | None:
    """What to say if the launcher started another number of ranks on this machine than the config asks for."""
    wanted, here = launch.nproc_per_node, os.environ.get("LOCAL_WORLD_SIZE", "")
    if wanted == "auto" or not here.isdigit() or int(here) == wanted:
        return None
    return f"launch: launch.nproc_per_node={wanted} is not used, because the launcher started {here} rank(s) here"


def meeting_point(launch: Launch) -> str:
    """`launch.rdzv_endpoint`, checked; one machine, which meets no others, needs none.

    Raises PlaitError if it is not host:port, or if the host is unknown.
    """
    several, given = launch.most > 1, launch.rdzv_endpoint
    if given is None and not several:
        return ""
    form = "HOST:PORT, the same for all machines: one of them, and a port that is free there, such as node0:29500"
    if given is None:
        raise PlaitError(f"launch.nnodes={launch.nnodes} needs launch.rdzv_endpoint={form}").at(
            "launch.rdzv_endpoint", fits=form
        )
    parts = re.fullmatch(r"(\[[0-9a-fA-F:.]+\]|[^\s:\[\]]+):([0-9]{1,9})", given)
    if parts is None:
        raise misfit("launch.rdzv_endpoint", given, form)
    least = 1 if several else 0
    if not least <= int(parts[2]) <= LAST_PORT:
        raise PlaitError(f"launch.rdzv_endpoint={given!r}: the port must be from {least} to {LAST_PORT}").at(
            "launch.rdzv_endpoint", given, fits=f"a port from {least} to {LAST_PORT}"
        )
    if several and not resolves(parts[1].strip("[]")):
        raise PlaitError(f"launch.rdzv_endpoint={given!r}: no machine named {parts[1]} can be found").at(
            "launch.rdzv_endpoint", given, fits="a machine that can be found"
        )
    return given


def resolves(host: str) -> bool:
    """Whether `host` has an address. Retries for some seconds if the name server does not answer."""
    for pause in (1, 2, 0):
        try:
            return bool(socket.getaddrinfo(host, None))
        except UnicodeError:  # not a valid machine name
            return False
        except socket.gaierror as error:
            if error.errno != socket.EAI_AGAIN:
                return False
        time.sleep(pause)
    return False
