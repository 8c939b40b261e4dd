"""The command `plait`: which subcommand was meant; each lives in a module of its own, imported when it is called."""

import errno
import importlib
import os
import sys

from plait.contract.errors import DiskError, PlaitError, in_words, near_miss, one_line, refused
from plait.system.signals import STOPS, Stopped
from plait.system.streams import console_may_fail, open_standard_streams

COMMANDS = {
    "train": ("plait.commands.train", "train a model, or with -m sweep over overrides"),
    "plugins": ("plait.commands.plugins", "list the installed strategies [--json] [--check]"),
    "inspect": (
        "plait.commands.inspect",
        "show what a run's composition will do, without starting it [overrides] [world=N]",
    ),
    "plan": (
        "plait.commands.plan",
        "what a step costs: memory, collectives, time [overrides] [world=N] [cluster=NAME]",
    ),
    "calibrate": ("plait.commands.calibrate", "measure this machine, for cluster=NAME [name=NAME] [ranks=N]"),
    "verify": (
        "plait.commands.verify",
        "does a model under strategies compute what one process does? [overrides] [world=N]",
    ),
    "convert": ("plait.commands.convert", "weights from Hugging Face's form to Plait's, and back"),
    "new": ("plait.commands.new", "write a plugin with a strategy that works, to begin one's own from"),
    "report": ("plait.commands.report", "one page of curves and tables from runs and sweeps DIR..."),
    "compare": ("plait.commands.compare", "where two runs part: two metrics.jsonl files or run folders"),
}


def main() -> None:
    """Entry point. Exits with 0; 1 after an error, in one sentence; 128 + n if signal n asked it to stop.

    Whoever reads what is printed may go away (`plait verify | head`): the command goes on, and its code is the same.
    """
    open_standard_streams()
    lost: list[OSError] = []
    try:
        with STOPS, console_may_fail(lost.append):
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
        sys.exit(1)
    except KeyboardInterrupt as error:
        print(f"plait: {one_line(error)}, though no signal came", file=sys.stderr)  # somebody's code raised it
        sys.exit(1)
    except Exception as error:
        from plait.strategies.hooks import TRACE

        if os.environ.get(TRACE):
            raise
        where = "" if refused(error) else f"; {TRACE}=1 shows where"
        print(f"plait: {one_line(error)}{where}", file=sys.stderr)
        sys.exit(1)


def _command(arguments: list[str]) -> int:
    completing = "-sc" in arguments or "--shell-completion" in arguments
    if completing or (arguments and arguments[0] in COMMANDS):
        if os.getcwd() not in sys.path:
            sys.path.append(os.getcwd())  # models of the user's own folder; last, so that they hide nothing
        module = "plait.commands.completion" if completing else COMMANDS[arguments[0]][0]
        return importlib.import_module(module).main(arguments[not completing :])
    if arguments in (["--version"], ["-V"]):
        from plait import __version__

        print(f"plait {__version__}")
        return 0
    if not arguments or arguments[0] in ("--help", "-h", "help"):
        print(_usage())
        return 0 if arguments else 1
    print(f"plait: no command {arguments[0]!r}{near_miss(arguments[0], list(COMMANDS))}\n{_usage()}", file=sys.stderr)
    return 1


def _usage() -> str:
    lines = [f"  plait {name:<9} {what}" for name, (_, what) in COMMANDS.items()]
    return "\n".join(
        ["usage: plait COMMAND [arguments]; `plait COMMAND --help` explains one", *lines, "  plait --version"]
    )
