"""Which launcher started this process, as a rank or as one of the machines, and what it says of it."""

import os
import re
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import attrs

from plait.contract.config import Launch
from plait.contract.errors import PlaitError, misfit, short
from plait.contract.kinds import KINDS
from plait.contract.schema import typed
from plait.launch.external import LAST_PORT, resolves
from plait.launch.torchrun import VARIABLES
from plait.strategies.registry import described, disabled, installed, load

MOST = 2**31 - 1
OWN = ("torchrun", "slurm")  # asked in this order: torchrun may be what a task of srun starts
COUNTS = (  # how many processes were started, by mpirun or one per machine
    *("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "WORLD_SIZE"),
    *("PET_NNODES", "SKYPILOT_NUM_NODES", "DSTACK_NODES_NUM", "AWS_BATCH_JOB_NUM_NODES"),
)
MACHINE = ("nnodes", "rdzv_endpoint", "nproc_per_node", "index")  # what a launcher may say of a machine
PATIENCE = 10.0  # seconds without a line


class Launcher(Protocol):
    """What an entry point in `plait.launchers` names: a light module, or another object. It has `variables` if it
    starts one process per rank, `machines` if it starts one per machine."""

    def detect(self, env: Mapping[str, str]) -> bool:
        """Whether it started the process with this environment."""

    def variables(self, env: Mapping[str, str]) -> Mapping[str, str | int]:
        """What torchrun would have set for that rank."""

    def machines(self, env: Mapping[str, str]) -> Mapping[str, str | int]:
        """Keys of `launch` that fit this machine, and `index`, its number."""


def launcher_of(launch: Any, mode: str = "") -> str | None:
    """The launcher that started this process; None if none did, or for `launch.mode=local`.

    launch: the node of a config, typed or not. mode: in place of its own.
    To ask a launcher is to import it. So `launch.mode=auto` asks those of other packages only if several processes were
    started and none of Plait's own knows them, or if several machines are to meet and nothing says where: a start is as
    fast with many of them installed.
    Raises PlaitError if one that is asked is broken, or if two of them started it.
    """
    mode = mode or launch.mode
    if mode == "local":
        return None
    if mode not in KINDS["launcher"].words:
        return mode if _asked(mode, "detect") else None
    own = next((name for name in OWN if name not in disabled() and _asked(name, "detect")), None)
    unknown = _counted(launch.nnodes) if launch.nnodes == 1 else launch.rdzv_endpoint is None
    if own is not None or (mode == "auto" and not unknown):
        return own
    names = installed("launcher").keys() - disabled() - set(OWN)
    others = [name for name in sorted(names) if _asked(name, "detect")]
    if len(others) > 1:
        both = " and ".join(described(name, "launcher") for name in others)
        raise PlaitError(f"{both} each say that they started this process: name one, launch.mode={others[0]}").at(
            "launch.mode", mode, fits=others
        )
    return next(iter(others), None)


def starts_machines(name: str) -> bool:
    """Whether the launcher `name` starts one process per machine."""
    return hasattr(load(name, "launcher"), "machines")


def rank_here(launch: Any, mode: str = "") -> int | None:
    """The rank that a launcher made of this process, or the number of this machine among several; None if it made none.

    launch, mode: as for `launcher_of`. Raises PlaitError as it does.
    """
    if (name := launcher_of(launch, mode)) is None:
        return None
    told, source = _told(name), f"it is what {name} says"
    if not starts_machines(name):
        return number(told, "RANK", 0, source=source)
    alone = str(launch.nnodes if launch.nnodes != 1 else told.get("nnodes", 1)) == "1"
    return None if alone or "index" not in told else number(told, "index", 0, source=source)


def among_machines(launch: Launch, say: Callable[[str], None]) -> Launch:
    """`launch` for Plait's own launcher, if another has started this process on each of the machines: with what that
    one says. What the config sets stays. Else `launch` as it is.

    Pods have a name for the others as soon as they start, so this waits for the endpoint's up to
    `launch.rendezvous_seconds`.
    Raises PlaitError if a launcher is broken, or does not say what is needed.
    """
    name = launcher_of(launch)
    if name is None or not starts_machines(name):
        return launch
    told, plugin, default = _told(name), described(name, "launcher"), Launch()
    if launch.nnodes == 1 and "nnodes" not in told:
        raise PlaitError(f"{plugin} does not say how many machines there are: set launch.nnodes").at("launch.nnodes", 1)
    new: dict[str, Any] = {
        key: int(value) if re.fullmatch("[0-9]{1,9}", value) else value
        for key, value in told.items()
        if key != "index" and getattr(launch, key) == getattr(default, key)
    }
    try:
        made = typed(Launch, {**attrs.asdict(launch), **new, "mode": "local"}, "launch")
    except PlaitError as error:
        raise PlaitError(f"{error}; it is what {plugin} says").at("launch.mode", name) from error
    if made.most > 1:
        say(f"launch: {name} started this command on each of {made.nnodes} machines")
        if host := new.get("rdzv_endpoint", "").rpartition(":")[0].strip("[]"):
            _wait_for(host, launch.rendezvous_seconds, say)
    return made


def _wait_for(host: str, seconds: float, say: Callable[[str], None]) -> None:
    began, told = time.monotonic(), 0.0
    while not resolves(host) and (waited := time.monotonic() - began) < seconds:
        if waited >= told + PATIENCE:
            told = waited
            say(f"launch: waiting for the machine {host}, whose name is not known yet")
        time.sleep(0.5)


def not_launched(mode: str) -> PlaitError:
    """The error if no launcher started this process, though `launch.mode` says so."""
    if mode == "external":
        others = "".join(f", nor by {name}" for name in installed("launcher") if name not in OWN)
        said = (
            "this process is neither one of torchrun's (RANK and WORLD_SIZE are not set) nor one of several tasks of "
            f"srun (SLURM_STEP_ID, SLURM_STEP_NUM_TASKS){others}: start this command with torchrun or srun"
        )
    else:
        said = f"{described(mode, 'launcher')} did not start this process: start this command with it"
    return PlaitError(f"launch.mode={mode}, but {said}, or use launch.mode=local").at(
        "launch.mode", mode, fits=("local",)
    )


def check_alone(nnodes: int) -> None:
    """Raises PlaitError if a launcher that this command does not join has started several processes: each would train
    alone."""
    if name := _counted(nnodes):
        count = os.environ[name]
        raise PlaitError(
            f"{name}={count} says that {count} processes were started, but none of the installed launchers "
            f"({', '.join(installed('launcher'))}) made this one a rank, so each would train alone: start them with "
            "torchrun or srun, set RANK and WORLD_SIZE, install a launcher that knows them (launch.mode), or set "
            "launch.mode=local to train alone"
        ).at(name, count, fits="RANK and WORLD_SIZE")


def _counted(nnodes: int) -> str | None:
    """The variable that says that several processes were started. Machines that are to meet by `launch.rdzv_endpoint`
    do so whatever started them."""
    most = {name: os.environ.get(name, "").rpartition(":")[2] for name in COUNTS}
    counts = [name for name, count in most.items() if re.fullmatch("[0-9]{1,9}", count) and int(count) > 1]
    return counts[0] if counts and nnodes == 1 else None


def _asked(name: str, function: str) -> Any:
    """What the function of the launcher `name` answers. Errors in it name the launcher."""
    launcher: Launcher = load(name, "launcher")
    try:
        return getattr(launcher, function)(dict(os.environ))
    except Exception:
        from plait.strategies.blame import blaming  # not above: most starts end before they need it

        with blaming(name, f"function {function!r}", "launcher"):
            raise


def _told(name: str) -> dict[str, str]:
    """What the launcher `name` says of this rank, in torchrun's variables, or of this machine, in keys of `launch`.
    Raises PlaitError for others."""
    function, keys = ("machines", MACHINE) if starts_machines(name) else ("variables", VARIABLES)
    said = _asked(name, function)
    wrong = sorted(map(str, said.keys() - set(keys))) if isinstance(said, Mapping) else [repr(said)]
    if wrong:
        raise PlaitError(
            f"{described(name, 'launcher')} returned {short(', '.join(wrong))} from its function {function!r}, which "
            f"must return a dict of {', '.join(keys)}"
        ).at("launch.mode", name, fits=keys)
    return {each: str(value) for each, value in said.items()}


def _check(told: Mapping[str, str], name: str) -> None:
    """Raises PlaitError if what the launcher `name` told is not all that ranks need to meet, or impossible."""
    plugin = described(name, "launcher")
    for each in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        if not told.get(each):
            raise PlaitError(f"{plugin} does not say {each}: without it ranks cannot meet").at(each)
    source = f"it is what {plugin} says"
    world = number(told, "WORLD_SIZE", 1, source=source)
    number(told, "RANK", 0, world - 1, source)
    here = number(told, "LOCAL_WORLD_SIZE", 1, world, source) if "LOCAL_WORLD_SIZE" in told else world
    if "LOCAL_RANK" in told:
        number(told, "LOCAL_RANK", 0, here - 1, source)
    number(told, "MASTER_PORT", 1, LAST_PORT, source)


def number(
    env: Mapping[str, str], name: str, least: int, most: int = MOST, source: str = "srun sets it in the environment"
) -> int:
    """The whole number in a variable. Raises PlaitError if it is none from `least` to `most`. source: for the error."""
    text = env.get(name, "")
    if re.fullmatch("[0-9]{1,18}", text) and least <= int(text) <= most:
        return int(text)
    fits = f"from {least} to {most}" if most < MOST else f"of at least {least}"
    raise misfit(name, text, f"a whole number {fits}; {source}")


def adopt(launch: Launch, name: str) -> None:
    """Become the rank that the launcher `name` made of this process. Raises PlaitError if that is impossible."""
    told = _told(name)
    _check(told, name)
    _check_one_of_many(launch, told)
    if not resolves(told["MASTER_ADDR"]):
        raise PlaitError(
            f"MASTER_ADDR={told['MASTER_ADDR']!r} is not the name of a machine that can be found: set it to the "
            "name or address of the machine of rank 0"
        ).at("MASTER_ADDR", told["MASTER_ADDR"], fits="a machine that can be found")
    for each in VARIABLES:
        os.environ.pop(each, None)
    os.environ.update(told)


def _check_one_of_many(launch: Launch, told: Mapping[str, str]) -> None:
    """Some launchers start one process per machine as a rank: Kubernetes' PyTorchJob. Raises PlaitError if more ranks
    were wanted here."""
    if "LOCAL_RANK" in told or "LOCAL_WORLD_SIZE" in told:
        return
    wanted, world = launch.nproc_per_node, int(told["WORLD_SIZE"])
    if wanted == "auto" and launch.device != "cpu" and world > 1:
        from torch.accelerator import device_count

        wanted = device_count()
    if type(wanted) is int and wanted > 1:
        raise PlaitError(
            f"{wanted} ranks are wanted here, but RANK and WORLD_SIZE are set without LOCAL_RANK: this command would "
            f"be one rank of {world}; start it with torchrun, or add launch.mode=local launch.nnodes={world} "
            "launch.rdzv_endpoint=$MASTER_ADDR:$MASTER_PORT"
        ).at("launch.nproc_per_node", launch.nproc_per_node, fits=(1,))
