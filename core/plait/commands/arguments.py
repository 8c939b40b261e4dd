"""What a command takes: options of argparse, values written key=value, and overrides of a run's configuration."""

import argparse
import itertools
import re
import textwrap
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from plait.contract.errors import PlaitError, UnknownKey, misfit, near_miss
from plait.records import text

WIDTH = 120  # characters of a line of help, on every terminal


class _Mistake(PlaitError):
    """What argparse has to say, in its own words."""


class Parser(argparse.ArgumentParser):
    """The arguments of one command. A mistake in them is a PlaitError; only --help shows how to use the command.

    A positional argument with nargs=REMAINDER gets everything, --help too. An option with nargs="?" has its value after
    a "=" alone. exit_code: of a mistake.
    """

    def __init__(self, name: str) -> None:
        super().__init__(prog=f"plait {name}", allow_abbrev=False)
        self.exit_code = 1
        self._values: dict[str, tuple[str, Callable[[str], Any], str]] = {}

    def add_value(self, key: str, metavar: str, read: Callable[[str], Any], help: str) -> None:
        """An argument `key=VALUE`, which may be left out: then it is None. read: makes it of the text after "="."""
        self._values[key] = metavar, read, help

    def take_overrides(self) -> None:
        """Overrides as for `plait train`, and where their configuration is found."""
        self.add_argument("overrides", nargs="*", default=[])
        self.add_argument("--config-dir", "-cd", metavar="DIR", help="a folder with configuration of your own")

    @property
    def composes(self) -> bool:
        """Whether it takes overrides of a run's configuration."""
        return any(action.dest == "overrides" for action in self._actions)

    def words(self) -> list[str]:
        """What an argument may begin with: options, and `key=`."""
        options = [word for action in self._actions for word in action.option_strings if word.startswith("--")]
        return [*options, *(f"{key}=" for key in self._values)]

    def take_world(self, least: int = 1, default: str = "what the degrees and launch.* ask for") -> None:
        """An argument `world=N`, the number of ranks."""
        fits = f"a number of ranks, at least {least}, such as world=4"
        self.add_value("world", "N", whole("world", fits, least), f"the number of ranks (default: {default})")

    def read(self, argv: Sequence[str]) -> argparse.Namespace:
        """Raises PlaitError for a mistake, and SystemExit after --help."""
        if everything := [action.dest for action in self._actions if action.nargs == argparse.REMAINDER]:
            return argparse.Namespace(**{everything[0]: list(argv)})
        if "-h" in argv or "--help" in argv:
            self.print_help()
            self.exit()
        given: dict[str, str] = {}
        rest = []
        for before, argument in itertools.pairwise(["", *argv]):
            key, sign, value = argument.partition("=")
            if sign and key in self._values and not self._needs_value(before):
                given[key] = value
            else:
                rest.append(argument + (f"={left_out}" if (left_out := self._value_left_out(argument)) else ""))
        try:
            found, unknown = self.parse_known_intermixed_args(rest)
        except _Mistake as mistake:
            raise self._in_words(mistake) from None
        if unknown:
            raise self._unknown(unknown[0])
        for key, (_, read, _) in self._values.items():
            setattr(found, key, read(given[key]) if key in given else None)
        return found

    def error(self, message: str) -> NoReturn:
        raise _Mistake(f"{self.prog}: {message}")

    def _needs_value(self, argument: str) -> bool:
        """Whether it is an option whose value is the next argument, whatever that looks like."""
        action = self._option_string_actions.get(argument)
        return action is not None and action.nargs is None

    def _value_left_out(self, argument: str) -> Any:
        action = self._option_string_actions.get(argument)
        return action.const if action is not None and action.nargs == "?" else None

    def _in_words(self, mistake: PlaitError) -> PlaitError:
        """What argparse means with its sentence."""
        message = str(mistake).removeprefix(f"{self.prog}: ")
        if missing := re.fullmatch("the following arguments are required: (.*)", message):
            names = missing[1].split(", ")
            return PlaitError(f"{self.prog} needs {' and '.join(names)}: {self._usage()}").at(names[0])
        if unfinished := re.fullmatch("argument (.*): expected (?:one|at least one) argument", message):
            name = unfinished[1].partition("/")[0]
            form = next(form for form in self._forms() if form.partition(" ")[0] == name)
            return PlaitError(f"{name} needs a value: {form}").at(name)
        return mistake

    def _unknown(self, argument: str) -> PlaitError:
        name = argument.partition("=")[0]
        known = [re.split("[ =[]", form)[0] for form in self._forms()]
        what = f"option {name}" if name.startswith("-") else f"argument {argument}"
        takes = ", ".join(self._forms())
        sentence = f"{self.prog} has no {what}; it takes {takes}{near_miss(name, known)}"
        return PlaitError(sentence).at(name, fits=known)

    def beside_keys(self, error: UnknownKey) -> PlaitError:
        """`error`, about an override that is no key of a run: it may have been meant for the command itself."""
        key = str(error.key)
        if "." in key or not self._values:
            return error
        if key in self._values:  # such as +world=2
            form = f"{key}={self._values[key][0]}"
            return PlaitError(f"{key} is an argument of {self.prog}, without a sign before it: {form}").at(
                key, fits=form
            )
        own, keys = list(self._values), [str(each) for each in error.fits or ()]
        options = [word for word in self.words() if word.startswith("--")]
        near = near_miss(key, [*own, *keys, *options])
        sentence = f"unknown key {key}; {self.prog} takes {', '.join(own)}, and keys of a run: {', '.join(keys)}{near}"
        return UnknownKey(sentence).at(key, fits=[*own, *keys])

    def format_help(self) -> str:
        usage = textwrap.fill(f"usage: {self._usage()}", WIDTH, subsequent_indent=" " * len(f"usage: {self.prog} "))
        actions = [(_form(action), action.help or "", not action.option_strings) for action in self._actions[1:]]
        rows = [(form, help) for form, help, positional in actions if positional and help]
        rows += [(f"{key}={metavar}", help) for key, (metavar, _, help) in self._values.items()]
        rows += [(form, help) for form, help, positional in actions if not positional]
        parts = [usage, self.description or "", "\n".join(_aligned(rows)), self.epilog or ""]
        return "\n\n".join(part.strip("\n") for part in parts if part) + "\n"

    def _usage(self) -> str:
        needed = {_form(action) for action in self._actions if action.required and action.nargs != "*"}
        return " ".join([self.prog, *(form if form in needed else f"[{form}]" for form in self._forms())])

    def _forms(self) -> list[str]:
        """Every argument as it is written, but --help."""
        first = [_form(action) for action in self._actions if not action.option_strings or action.required]
        values = [f"{key}={metavar}" for key, (metavar, _, _) in self._values.items()]
        options = [_form(action) for action in self._actions if action.option_strings and not action.required]
        return [*first, *values, *options[1:]]  # the first one is --help


def _form(action: argparse.Action) -> str:
    name = str(action.metavar or action.dest)
    if not action.option_strings:
        return f"{name}..." if action.nargs == "+" else name
    option = action.option_strings[0]
    if action.nargs == "?":
        return f"{option}[={name}]"
    return option if action.nargs == 0 else f"{option} {name}"


def _aligned(rows: list[tuple[str, str]]) -> list[str]:
    """The arguments in one column, what they mean in another."""
    left = max((len(form) for form, _ in rows), default=0)
    lines = []
    for form, help in rows:
        first, *more = textwrap.wrap(" ".join(help.split()), WIDTH - left - 4)
        lines += [(form, first), *(("", line) for line in more)]
    return text.table(lines, indent="  ")


def one_of(name: str, *fits: str) -> Callable[[str], str]:
    """Reads one of these texts."""

    def read(value: str) -> str:
        if value not in fits:
            raise PlaitError(f"{name} is {value!r}; it must be {' or '.join(fits)}{near_miss(value, fits)}").at(
                name, value, fits
            )
        return value

    return read


def whole(name: str, fits: str, least: int = 0) -> Callable[[str], int]:
    """Reads a whole number; `fits` continues the sentence "it must be"."""

    def read(value: str) -> int:
        if not value.isdecimal() or int(value) < least:
            raise misfit(name, value, fits)
        return int(value)

    return read


def overrides_of(args: argparse.Namespace, overrides: Sequence[str] | None = None) -> list[str]:
    """What `Parser.take_overrides` took, as `plait.host.compose` wants it. overrides: others, composed where these
    would be."""
    given = args.overrides if overrides is None else overrides
    return [*given, *(["--config-dir", args.config_dir] if args.config_dir else [])]
