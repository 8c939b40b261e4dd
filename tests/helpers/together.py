"""One run on the machines of a test: how each is started, and what it must equal."""

from pathlib import Path

from tests.helpers.commands import SMALL
from tests.helpers.machines import Command, Machine

FSDP = ["strategy=[fsdp2]", "train.steps=10", "run.name=a"]


def train(machine: Machine, cwd: Path, *overrides: str, endpoint: str = "alpha:29500", **env: str) -> Command:
    """One of two launchers of the run `a`, with one rank."""
    together = ["launch.nnodes=2", "launch.nproc_per_node=1", f"launch.rdzv_endpoint='{endpoint}'"]
    return machine.plait("train", *SMALL, *FSDP, *together, *overrides, cwd=cwd, **env)


def codes(*commands: Command) -> list[int]:
    return [command.code() for command in commands]


def outputs(*commands: Command) -> str:
    return "\n".join(command.output for command in commands)
