"""The command `plait`: finds the subcommand, whose module is imported only when it is called."""

import errno
import importlib
import os
import sys
import traceback
from collections import deque
from types import FrameType

from plait.contract.errors import PlaitError, near_miss
from plait.system.errors import DiskError, in_words, one_line, refused
from plait.system.exits import exits_noted
from plait.system.signals import STOP_SIGNALS, Stopped
from plait.system.streams import console_may_fail, open_standard_streams

COMMANDS = {
    "train": ("plait.commands.train", "train a model, or with -m sweep over overrides"),
    "plugins": ("plait.commands.plugins", "list the installed strategies [--json] [--check]"),
    "inspect": (
        "plait.commands.inspect",
        "show what a run would set up, without starting it [overrides] [world=N]",
    ),
    "plan": (
        "plait.commands.plan",
        "predict what a step costs: memory, collectives, time [overrides] [world=N] [cluster=NAME]",
    ),
    "calibrate": ("plait.commands.calibrate", "measure this machine, for cluster=NAME [name=NAME] [ranks=N]"),
    "verify": (
        "plait.commands.verify",
        "check that a model under strategies computes what one process does [overrides] [world=N]",
    ),
    "convert": ("plait.commands.convert", "convert weights from Hugging Face's form to Plait's, and back"),
    "new": ("plait.commands.new", "write a plugin with a working strategy, as a start for your own"),
    "report": ("plait.commands.report", "make one page of curves and tables from runs and sweeps DIR..."),
    "compare": (
        "plait.commands.compare",
        "show the first step at which two runs differ: two metrics.jsonl files or run folders",
    ),
}


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
    last = deque(traceback.walk_tb(error.__traceback__), maxlen=1)[0][0]
    return str(last.f_globals.get("__name__")).partition(".")[0] in ("plait", "argparse", "hydra")


def _exited(status: int, caller: FrameType) -> None:
    """The same for `os._exit`, after which nothing else runs."""
    from plait.launch.rank_end import location_of

    print(f"plait: os._exit({status}) was called{location_of(caller)}", file=sys.stderr, flush=True)
    os._exit(1)


def _command(arguments: list[str]) -> int:
    completing = "-sc" in arguments or "--shell-completion" in arguments
    if completing or (arguments and arguments[0] in COMMANDS):
        if (here := _here()) not in sys.path:
            sys.path.append(here)  # for models in the user's own folder; last, so that they hide no module
        module = "plait.commands.completion" if completing else COMMANDS[arguments[0]][0]
        return importlib.import_module(module).main(arguments[not completing :])
    if arguments in (["--version"], ["-V"]):
        from plait import __version__

        print(f"plait {__version__}")
        return 0
    if not arguments or arguments[0] in ("--help", "-h", "help"):
        print(_usage())
        return 0 if arguments else 1
    print(
        f"plait: unknown command {arguments[0]!r}{near_miss(arguments[0], list(COMMANDS))}\n{_usage()}", file=sys.stderr
    )
    return 1


def _here() -> str:
    try:
        return os.getcwd()
    except OSError as error:
        raise DiskError(
            f"the current folder cannot be used: {in_words(error)}; it may have been removed, so change to another"
        ) from None


def _usage() -> str:
    lines = [f"  plait {name:<9} {what}" for name, (_, what) in COMMANDS.items()]
    return "\n".join(
        ["usage: plait COMMAND [arguments]; `plait COMMAND --help` explains one", *lines, "  plait --version"]
    )
