"""What torchrun, Slurm or `launch.rdzv_endpoint` say about where ranks are, and whether it is possible."""

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
MOST = 2**31 - 1
PATIENCE = 10.0  # seconds without a line
SHELLS = {"4294967290", "4294967291"}  # Slurm's steps that are the shell of an interactive session, or of a script
MPI = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE")  # how many processes mpirun started


def by_torchrun() -> bool:
    return {"RANK", "WORLD_SIZE"} <= os.environ.keys()


def by_slurm() -> bool:
    """Whether srun started this process as one of several tasks.

    The shell of a batch script or of an interactive session has the variables of task 0, but is none: the first has no
    step, the second a step with one task; both may have a number that Slurm keeps for them.
    """
    tasks = _tasks()
    if not {"SLURM_PROCID", "SLURM_STEP_ID"} <= os.environ.keys() or os.environ["SLURM_STEP_ID"] in SHELLS:
        return False
    return tasks is not None and _number(tasks, 1) > 1


def check_alone(launch: Launch) -> None:
    """Raises PlaitError if a launcher that this command does not join has started several processes: each would train
    alone. Machines that are to meet by `launch.rdzv_endpoint` do so whatever started them."""
    if launch.nnodes > 1:
        return
    for name in (*MPI, "WORLD_SIZE"):
        count = os.environ.get(name, "")
        if count.isdigit() and int(count) > 1:
            raise PlaitError(
                f"{name}={count} says that {count} processes were started, but RANK and WORLD_SIZE are not both set, "
                "so each would train alone: start them with torchrun or srun, or set launch.mode=local to train alone"
            ).at(name, count, fits="RANK and WORLD_SIZE")


def _tasks() -> str | None:
    """The variable with the number of tasks beside this one; a step may have fewer than its job."""
    return next((name for name in ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS") if name in os.environ), None)


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


def left_idle() -> str | None:
    """What to say if Slurm gave the job more than this command uses, because srun did not start it."""
    env = os.environ
    if "SLURM_JOB_ID" not in env or env.get("SLURM_STEP_ID", min(SHELLS)) not in SHELLS:
        return None
    counts = {"tasks": env.get("SLURM_NTASKS", "1"), "nodes": env.get("SLURM_NNODES", "1")}
    several = " on ".join(f"{count} {what}" for what, count in counts.items() if count.isdigit() and int(count) > 1)
    if not several:
        return None
    return f"launch: Slurm gave this job {several}, but srun did not start this command: it uses this machine alone"


def unused_number(launch: Launch) -> str | None:
    """What to say if the launcher started another number of ranks on this machine than the config asks for."""
    wanted, here = launch.nproc_per_node, os.environ.get("LOCAL_WORLD_SIZE", "")
    if wanted == "auto" or not here.isdigit() or int(here) == wanted:
        return None
    return f"launch: launch.nproc_per_node={wanted} is not used, because the launcher started {here} rank(s) here"


def adopt(launch: Launch) -> None:
    """Become the rank that the launcher made this process; Slurm's variables are translated to torchrun's.

    Raises PlaitError that names the variable that is missing or impossible.
    """
    if not by_torchrun():
        _slurm_to_torchrun()
    world = _number("WORLD_SIZE", 1)
    _number("RANK", 0, world - 1)
    _check_one_of_many(launch, world)
    here = _number("LOCAL_WORLD_SIZE", 1, world) if "LOCAL_WORLD_SIZE" in os.environ else world
    if "LOCAL_RANK" in os.environ:
        _number("LOCAL_RANK", 0, here - 1)
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        if not os.environ.get(name):
            raise PlaitError(f"RANK and WORLD_SIZE are set, but {name} is not: the ranks cannot find rank 0").at(name)
    _number("MASTER_PORT", 1, LAST_PORT)
    if not resolves(os.environ["MASTER_ADDR"]):
        raise PlaitError(
            f"MASTER_ADDR={os.environ['MASTER_ADDR']!r} is not the name of a machine that can be found: set it to the "
            "name or address of the machine of rank 0"
        ).at("MASTER_ADDR", os.environ["MASTER_ADDR"], fits="a machine that can be found")


def _check_one_of_many(launch: Launch, world: int) -> None:
    """Some launchers start one process per machine as a rank: Kubernetes' PyTorchJob. Raises PlaitError if more ranks
    were wanted here."""
    if "LOCAL_RANK" in os.environ or "LOCAL_WORLD_SIZE" in os.environ:
        return
    wanted = launch.nproc_per_node
    if wanted == "auto" and launch.device != "cpu" and world > 1:
        from torch.accelerator import device_count

        wanted = device_count()
    if type(wanted) is int and wanted > 1:
        raise PlaitError(
            f"{wanted} ranks are wanted here, but RANK and WORLD_SIZE are set without LOCAL_RANK: this command would "
            f"be one rank of {world}; start it with torchrun, or add launch.mode=local launch.nnodes={world} "
            "launch.rdzv_endpoint=$MASTER_ADDR:$MASTER_PORT"
        ).at("launch.nproc_per_node", launch.nproc_per_node, fits=(1,))


def _slurm_to_torchrun() -> None:
    env = os.environ
    world = _number(_tasks() or "SLURM_NTASKS", 1)
    env["WORLD_SIZE"] = str(world)
    env["RANK"] = str(_number("SLURM_PROCID", 0, world - 1))
    env["LOCAL_RANK"] = str(_number("SLURM_LOCALID", 0, world - 1)) if "SLURM_LOCALID" in env else "0"
    nodes = next((name for name in ("SLURM_STEP_NUM_NODES", "SLURM_NNODES") if name in env), None)
    if nodes is not None and _number(nodes, 1) == 1:
        env.setdefault("LOCAL_WORLD_SIZE", str(world))
        env.setdefault("MASTER_ADDR", "localhost")
    env.setdefault("MASTER_ADDR", _first_machine())
    job, step = (_number(name, 0) if name in env else 0 for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
    env.setdefault("MASTER_PORT", str(20000 + (job + 4999 * step) % 20000))  # two steps of a job may run side by side


def _first_machine() -> str:
    """The machine of task 0: `rack1-node3` for the list rack1-node[3-5,9],rack2-node1. SLURM_LAUNCH_NODE_IPADDR is the
    machine where srun was typed, perhaps a login machine."""
    for name in ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"):
        if first := re.match(r"(?:[^,\[]|\[[^\]]*\])+", os.environ.get(name, "")):
            return re.sub(r"\[([^-,\]]*)[^\]]*\]", r"\1", first[0])
    return os.environ.get("SLURM_LAUNCH_NODE_IPADDR", "localhost")


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
