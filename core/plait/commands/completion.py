"""Tab completion: what may go on a line of `plait`. Read from names and lines of files, without composing a config:
somebody waits for every answer."""

import os
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import cached_property
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

import attrs

if TYPE_CHECKING:
    from plait.commands.arguments import Parser

SIGNS = "+~"  # before a key: append, remove
DEFAULT = re.compile(r"^  - (\w+): (\S+)$", re.MULTILINE)
OF_TRAIN = ("--help", "--multirun", "--config-dir", "--cfg", "--info")


def complete(arguments: list[str], commands: Collection[str], parser_of: Callable[[str], "Parser"]) -> int:
    """Answer `plait -sc install=SHELL`, `uninstall=SHELL` or `query=SHELL`; a query reads its line from COMP_LINE.

    parser_of: makes the parser of a command.
    """
    asked = [a for a in arguments if a not in commands]
    if any(a.startswith("query=") for a in asked):
        line = os.environ.get("COMP_LINE", "")
        point = os.environ.get("COMP_POINT", "")
        print("\n".join(candidates(line[: int(point)] if point.isdecimal() else line, commands, parser_of)))
        return 0
    from plait.compose.compose import composed

    composed(lambda cfg: None, asked)  # Hydra has the code for each shell
    return 0


def candidates(line: str, commands: Collection[str], parser_of: Callable[[str], "Parser"]) -> list[str]:
    """The words that the last one of `line`, which may be empty, can become. None where file names fit."""
    _, *given, word = ["", *line.split(" ")] if " " not in line else line.split(" ")
    if not given:
        return sorted(name for name in commands if name.startswith(word))
    if given[0] not in commands:
        return []
    parser = parser_of(given[0])
    every = [*parser.words(), *(OF_TRAIN if given[0] == "train" else ())]
    if not word.startswith("-") and (parser.composes or given[0] == "train"):
        every += Offered(given[1:]).candidates(word)
    return sorted({each for each in every if each.startswith(word)})


@attrs.define(slots=False)
class Offered:
    """What the files of options offer beside the words that are on the line already."""

    words: Sequence[str]

    @cached_property
    def folders(self) -> list[Path]:
        """With the options of all groups: Plait's, those of packages, the user's."""
        from plait.strategies.shipped import shipped

        own = [Path(str(files("plait.conf"))), *(each.conf for each in shipped()), Path("conf")]
        flags = ("--config-dir", "-cd")
        given = [Path(after) for flag, after in zip(self.words, self.words[1:], strict=False) if flag in flags]
        return [folder for folder in (*own, *given) if folder.is_dir()]

    @cached_property
    def groups(self) -> set[str]:
        inner = (each for folder in self.folders for each in folder.iterdir())
        return {each.name for each in inner if each.is_dir() and any(each.glob("*.yaml"))}

    @cached_property
    def defaults(self) -> dict[str, str]:
        """Group -> what Plait selects of it. The others are appended, with a "+"."""
        text = files("plait.conf").joinpath("train.yaml").read_text(encoding="utf-8")
        return dict(DEFAULT.findall(text.partition("_self_")[0]))

    def candidates(self, word: str) -> Iterator[str]:
        sign = word[: len(word) - len(word.lstrip(SIGNS))]
        key, equals, value = word[len(sign) :].partition("=")
        if equals:
            yield from (f"{sign}{key}={each}" for each in self._values(key, value))
            return
        groups = (f"{group}=" if sign or group in self.defaults else f"+{group}=" for group in self.groups)
        for full in (*groups, *(f"{name}=" for name in self._keys())):
            if full.startswith(key):
                yield sign + full[: full.find(".", len(key)) + 1 or len(full)]  # one node at a time

    def _values(self, key: str, value: str) -> Iterator[str]:
        before = value[: max(value.rfind("["), value.rfind(",")) + 1]
        if key in self.groups:
            for folder in self.folders:
                yield from (before + file.stem for file in (folder / key).glob("*.yaml"))
        elif self._keys().get(key) in ("true", "false"):
            yield from ("true", "false")

    def _keys(self) -> dict[str, str]:
        """Key -> the value that it has without an override."""
        from plait.compose.keys import keys, of_a_run

        every = {each.path: each.value for each in of_a_run() if not each.path.startswith("hydra")}
        nodes = {key.rpartition(".")[0] for key in every}
        every = {key: value for key, value in every.items() if key not in nodes}
        for group, option in self._chosen():
            for folder in self.folders:
                if (file := folder / group / f"{option}.yaml").is_file():
                    text = file.read_text(encoding="utf-8")
                    package = re.match(r"# @package ([\w.]+)", text)
                    node = package[1] if package else group
                    every |= {f"{node}.{each.path}": each.value for each in keys(text)} if node != "_global_" else {}
        return every

    def _chosen(self) -> Iterator[tuple[str, str]]:
        """(group, option) of the words, and of Plait's defaults where there is none."""
        chosen = {group: option for group, option in self.defaults.items() if option != "null"}
        for word in self.words:
            group, equals, options = word.strip("'\"").lstrip(SIGNS).partition("=")
            if equals and group in self.groups:
                chosen[group] = options
        for group, options in chosen.items():
            yield from ((group, option) for option in re.findall(r"[\w.-]+", options))
