"""The command `plait`: finds the subcommand, whose module is imported only when it is called."""

import errno
import os
import sys
from collections.abc import Sequence
from types import FrameType
from typing import TYPE_CHECKING, Protocol

from plait.contract.errors import PlaitError, UnknownKey, near_miss
from plait.system.errors import DiskError, in_words, one_line, refused
from plait.system.exits import exits_noted
from plait.system.signals import STOP_SIGNALS, Stopped
from plait.system.streams import console_may_fail, open_standard_streams

if TYPE_CHECKING:
    from argparse import Namespace

    from plait.commands.arguments import Parser

OWN = "plait-core"  # this distribution


class Subcommand(Protocol):
    """What an entry point in `plait.commands` names: a light module, or another object. help: one line about it."""

    help: str

    def arguments(self, parser: "Parser") -> None:
        """Say what it takes."""

    def run(self, args: "Namespace") -> int:
        """Do it, and return the exit code."""


def main() -> None:
    """Entry point. Exits with 0; 1 after an error, in one sentence; 128 + n if signal n stopped it.

    If the reader of the output goes away (`plait verify | head`), the command continues with the same exit code.
    """
    open_standard_streams()
    lost: list[OSError] = []
    try:
        with STOP_SIGNALS, exits_noted(_exited), console_may_fail(lost.append):
            code = _command(sys.argv[1:])
        if full := [error for error in lost if error.errno != errno.EPIPE]:
            raise DiskError(f"standard output cannot be written: {in_words(full[0])}")
        sys.exit(code)
    except Stopped as stop:
        early = ", before training began" if sys.argv[1:2] == ["train"] else ""
        print(f"plait: stopped by {stop}{early}", file=sys.stderr)
        sys.exit(128 + stop.number)
    except PlaitError as error:
        print(f"plait: {one_line(error)}", file=sys.stderr)
        sys.exit(error.exit_code)
    except (KeyboardInterrupt, SystemExit) as error:
        if isinstance(error, SystemExit) and _own(error):
            raise
        from plait.launch.rank_end import raised_in

        said = (
            f"sys.exit({error.code!r}) was called" if isinstance(error, SystemExit) else "KeyboardInterrupt was raised"
        )
        print(f"plait: {said}{raised_in(error)}", file=sys.stderr)
        sys.exit(1)
    except Exception as error:
        from plait.strategies.hooks import TRACE

        if os.environ.get(TRACE):
            raise
        where = "" if refused(error) else f"; {TRACE}=1 shows where"
        print(f"plait: {one_line(error)}{where}", file=sys.stderr)
        sys.exit(1)


def _own(error: SystemExit) -> bool:
    """Whether the command itself ends, and not code of a plugin or a model, where code 0 would look like success."""
    last = error.__traceback__
    assert last is not None
    while last.tb_next is not None:
        last = last.tb_next
    return str(last.tb_frame.f_globals.get("__name__")).partition(".")[0] in ("plait", "argparse", "hydra")


def _exited(status: int, caller: FrameType) -> None:
    """The same for `os._exit`, after which nothing else runs."""
    from plait.launch.rank_end import location_of

    print(f"plait: os._exit({status}) was called{location_of(caller)}", file=sys.stderr, flush=True)
    os._exit(1)


def _command(arguments: list[str]) -> int:
    name, *rest = arguments or [""]
    completing = "-sc" in arguments or "--shell-completion" in arguments
    if arguments in (["--version"], ["-V"]):
        from plait import __version__

        print(f"plait {__version__}")
        return 0
    if not arguments or name in ("--help", "-h", "help"):
        print(_usage())
        return 0 if arguments else 1
    from plait.strategies.registry import installed

    commands = installed("command")
    if completing or name in commands:
        if (here := _here()) not in sys.path:
            sys.path.append(here)  # for models in the user's own folder; last, so that they hide no module
        if completing:
            from plait.commands.completion import complete

            return complete(arguments, commands, parser_of)
        return run(name, rest)
    from plait.contract.absent import absent_command

    known = list(commands)
    if (absent := absent_command(name)) is not None:
        raise absent
    raise PlaitError(f"unknown command {name!r}; available: {', '.join(known)}{near_miss(name, known)}").at(
        name, fits=known
    )


def command_of(name: str) -> Subcommand:
    """The command `name`, imported. Raises PlaitError if it is not installed, or is none."""
    from plait.strategies.registry import load

    return load(name, "command")


def run(name: str, argv: Sequence[str]) -> int:
    """What `plait NAME ARGV` does; returns its exit code. Raises PlaitError, and SystemExit after --help."""
    command, parser = command_of(name), parser_of(name)
    try:
        return int(command.run(parser.read(argv)) or 0)
    except UnknownKey as error:
        said = parser.beside_keys(error)
        said.exit_code = max(error.exit_code, parser.exit_code)
        raise said from error
    except PlaitError as error:
        error.exit_code = max(error.exit_code, parser.exit_code)
        raise
    except Exception as error:
        from plait.strategies.hooks import TRACE
        from plait.strategies.registry import usable

        plugin = usable(name, "command")
        if plugin.distribution == OWN or refused(error) or os.environ.get(TRACE):
            raise
        raise PlaitError(f"{plugin} failed: {one_line(error)}") from error


def parser_of(name: str) -> "Parser":
    from plait.commands.arguments import Parser

    parser = Parser(name)
    command_of(name).arguments(parser)
    return parser


def _here() -> str:
    try:
        return os.getcwd()
    except OSError as error:
        raise DiskError(
            f"the current folder cannot be used: {in_words(error)}; it may have been removed, so change to another"
        ) from None


def shipped() -> list[str]:
    """The commands of the core, and of the packages that `pip install plait` installs beside it."""
    from plait.contract.absent import COMMANDS
    from plait.strategies.registry import installed

    return [name for name, by in installed("command").items() if by.distribution in {OWN, *COMMANDS.values()}]


def _usage() -> str:
    """One line per command. Those of strangers are not imported for it, so they say only where they are from."""
    from plait.records.text import table
    from plait.strategies.registry import installed

    ours = shipped()
    rows = [
        (f"plait {name}", command_of(name).help if name in ours else f"from {by.distribution}")
        for name, by in installed("command").items()
    ]
    lines = table([*rows, ("plait --version", "")], indent="  ")
    return "\n".join(["usage: plait COMMAND [arguments]; `plait COMMAND --help` explains one", *lines])
