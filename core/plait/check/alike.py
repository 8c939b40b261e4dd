"""Refuses to train on machines that differ in what determines the numbers, before anything is written."""

import hashlib
import os
import socket
from collections.abc import Callable, Sequence

import attrs

from plait.check import facts
from plait.check.facts import Facts
from plait.contract.config import Config
from plait.contract.errors import PlaitError, short
from plait.system.errors import packed, unpacked
from plait.system.sockets import one_machine

SHOWN = 3  # differences
CURE = {
    "config": "give every machine the same command",
    "version": "install the same versions on every machine",
    "code": "install the same code on every machine",
    "device": "set launch.device",
    "variable": "set the same environment on every machine",
    "files": "give every machine the same files",
    "data": "give every machine the same data",
}


@attrs.frozen
class Told:
    """What one rank tells the others. machine: what only one rank per machine finds out. problem: a packed
    PlaitError, if it could not."""

    rank: int
    host: str
    command: Facts
    machine: Facts | None = None
    problem: str | None = None

    @property
    def digests(self) -> tuple[str, str | None]:
        """Equal on all ranks that agree; the second is None if another rank of the machine tells it."""
        return _digest(self.command), None if self.machine is None else _digest([self.machine, self.problem])


def check_alike(config: Config) -> None:
    """Raises PlaitError, the same on all ranks, unless all have the same config and their machines the same versions,
    code, environment, data and files. One gather of digests if they do; another one tells what differs.

    config: as asked for on this machine.
    """
    import torch.distributed as dist

    mine = tell(config)
    digests: list[tuple[str, str | None]] = [mine.digests] * dist.get_world_size()
    dist.all_gather_object(digests, mine.digests)
    if mine.problem is None and all(len({*column} - {None}) <= 1 for column in zip(*digests, strict=True)):
        return
    told = [mine] * len(digests)
    dist.all_gather_object(told, mine)
    if (problem := difference(told)) is not None:
        raise problem


def tell(config: Config) -> Told:
    rank, host, command = int(os.environ.get("RANK", "0")), socket.gethostname(), facts.of_command(config)
    if one_machine() or os.environ.get("LOCAL_RANK", "0") != "0":
        return Told(rank, host, command)
    try:
        return Told(rank, host, command, facts.of_machine(config))
    except PlaitError as error:
        return Told(rank, host, command, {}, packed(error))


def difference(told: Sequence[Told]) -> PlaitError | None:
    """The error for the first rank that is not as rank 0, or cannot read what it needs; None if all are alike."""
    first = told[0]
    for each in told:
        if each.problem is not None:
            error = unpacked(each.problem)
            error.args = (f"{error} (on {each.host})",)
            return error
    for other in told[1:]:
        for kind in ("command", "machine"):
            ours, theirs = getattr(first, kind), getattr(other, kind)
            if ours and theirs and (differ := [key for key in {**ours, **theirs} if ours.get(key) != theirs.get(key)]):
                return _error(first, other, ours, theirs, differ)
    return None


def _error(first: Told, other: Told, ours: Facts, theirs: Facts, differ: list[tuple[str, str]]) -> PlaitError:
    here, there = first.host, other.host
    if here == there:
        here, there = f"{here} (rank {first.rank})", f"{there} (rank {other.rank})"
    kinds: dict[str, list[str]] = {}
    for kind, name in differ:
        kinds.setdefault(kind, []).append(name)
    differences = []
    for kind, names in kinds.items():
        words = [WORDS[kind](name, theirs.get((kind, name)), there, ours.get((kind, name)), here) for name in names]
        more = f" and {len(words) - SHOWN} more" if len(words) > SHOWN else ""
        differences.append(", ".join(words[:SHOWN]) + more)
    kind, name = differ[0]
    cures = ", ".join(CURE[kind] for kind in kinds)
    error = PlaitError(f"the machines of a run must be alike: {'; '.join(differences)}: {cures}")
    return error.at(name.partition("=")[0], theirs.get((kind, name)), fits=(ours.get((kind, name)),))


def _config(name: str, theirs: str | None, there: str, ours: str | None, here: str) -> str:
    values = [f"{name}={short(value)}" if value is not None else f"no {name}" for value in (theirs, ours)]
    return f"{values[0]} on {there}, {values[1].removeprefix(f'{name}=')} on {here}"


def _version(name: str, theirs: str | None, there: str, ours: str | None, here: str) -> str:
    has = f"{name} {theirs}" if theirs is not None else f"no {name}"
    return f"{there} has {has}, {here} {ours or 'none'}"


def _variable(name: str, theirs: str | None, there: str, ours: str | None, here: str) -> str:
    values = [f"{name}={short(value)}" if value is not None else f"no {name}" for value in (theirs, ours)]
    return f"{there} has {values[0]}, {here} {values[1]}"


def _device(name: str, theirs: str | None, there: str, ours: str | None, here: str) -> str:
    return f"{there} trains on {theirs}, {here} on {ours}"


def _content(name: str, theirs: str | None, there: str, ours: str | None, here: str) -> str:
    if theirs is None or ours is None:
        return f"{name} is on {there if ours is None else here} alone"
    return f"{name} on {there} is not that on {here}"


def _data(name: str, theirs: str | None, there: str, ours: str | None, here: str) -> str:
    return f"the data or its tokenizer on {there} is not that on {here}"


WORDS: dict[str, Callable[[str, str | None, str, str | None, str], str]] = {
    "config": _config,
    "version": _version,
    "variable": _variable,
    "device": _device,
    "code": _content,
    "files": _content,
    "data": _data,
}


def _digest(what: object) -> str:
    return hashlib.sha256(repr(what).encode()).hexdigest()
