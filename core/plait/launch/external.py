"""What torchrun, Slurm or `launch.rdzv_endpoint` say about where ranks are, and whether it is possible."""

import os
import re
import socket
import time

from plait.contract.config import Launch
from plait.contract.errors import PlaitError, misfit

LAST_PORT = 65535
MOST = 2**31 - 1


def by_torchrun() -> bool:
    return {"RANK", "WORLD_SIZE"} <= os.environ.keys()


def by_slurm() -> bool:
    return {"SLURM_PROCID", "SLURM_NTASKS"} <= os.environ.keys() and _number("SLURM_NTASKS", 1) > 1


def adopt() -> None:
    """Become the rank that the launcher made this process; Slurm's variables are translated to torchrun's.

    Raises PlaitError that names the variable that is missing or impossible.
    """
    if not by_torchrun():
        _slurm_to_torchrun()
    world = _number("WORLD_SIZE", 1)
    _number("RANK", 0, world - 1)
    here = _number("LOCAL_WORLD_SIZE", 1, world) if "LOCAL_WORLD_SIZE" in os.environ else world
    if "LOCAL_RANK" in os.environ:
        _number("LOCAL_RANK", 0, here - 1)
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        if not os.environ.get(name):
            raise PlaitError(f"RANK and WORLD_SIZE are set, but {name} is not: the ranks cannot find rank 0").at(name)
    _number("MASTER_PORT", 1, LAST_PORT)
    if not resolves(os.environ["MASTER_ADDR"]):
        raise PlaitError(
            f"MASTER_ADDR={os.environ['MASTER_ADDR']!r} is not the name of a machine that can be found"
        ).at("MASTER_ADDR", os.environ["MASTER_ADDR"], fits="a machine that can be found")


def _slurm_to_torchrun() -> None:
    env = os.environ
    world = _number("SLURM_NTASKS", 1)
    env["WORLD_SIZE"] = str(world)
    env["RANK"] = str(_number("SLURM_PROCID", 0, world - 1))
    env["LOCAL_RANK"] = str(_number("SLURM_LOCALID", 0, world - 1)) if "SLURM_LOCALID" in env else "0"
    nodes = next((name for name in ("SLURM_STEP_NUM_NODES", "SLURM_NNODES") if name in env), None)
    if nodes is not None and _number(nodes, 1) == 1:
        env.setdefault("LOCAL_WORLD_SIZE", str(world))
    env.setdefault("MASTER_ADDR", env.get("SLURM_LAUNCH_NODE_IPADDR", "localhost"))
    job = _number("SLURM_JOB_ID", 0) if "SLURM_JOB_ID" in env else 0
    env.setdefault("MASTER_PORT", str(20000 + job % 20000))


def _number(name: str, least: int, most: int = MOST) -> int:
    text = os.environ[name]
    if re.fullmatch("[0-9]{1,18}", text) and least <= int(text) <= most:
        return int(text)
    fits = f"from {least} to {most}" if most < MOST else f"of at least {least}"
    raise misfit(name, text, f"a whole number {fits}; the launcher sets it in the environment")


def meeting_point(launch: Launch) -> str:
    """`launch.rdzv_endpoint`, checked; one machine, which meets no others, needs none.

    Raises PlaitError if it is not host:port, or if the host is unknown.
    """
    several, given = launch.nnodes > 1, launch.rdzv_endpoint
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
