"""Refuses invalid arguments of `plait train` before Hydra reads or writes anything."""

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, NoReturn

from plait.compose.foreign import unknown_flag
from plait.contract.errors import PlaitError, in_yaml, misfit
from plait.contract.kinds import KINDS

if TYPE_CHECKING:
    from hydra.core.override_parser.types import Override

LISTS = tuple(kind.choice for kind in KINDS.values() if kind.several)  # groups of which a run takes several options
SINGLE = (*(kind.choice for kind in KINDS.values() if kind.choice and not kind.several), "cluster")
OPTIONAL = (*(kind.choice for kind in KINDS.values() if kind.node and not kind.several), "cluster")  # ~GROUP: none
GROUPS = (*LISTS, *SINGLE, "recipe", "hardware")
FOLDERS = {"hydra.run.dir": (".",), "hydra.output_subdir": (None,), "hydra.job.chdir": (False, None)}


def parsed(lines: Sequence[str]) -> "list[Override]":
    """What Hydra reads in these overrides."""
    from hydra.core.override_parser.overrides_parser import OverridesParser

    return OverridesParser.create().parse_overrides(list(lines))


def check_arguments(argv: list[str]) -> None:
    """Raises PlaitError for an unknown flag, and for overrides that Hydra accepts but that make no sense for a run."""
    from plait.compose.hydra_internals import arguments_parser

    parser = arguments_parser()
    parser.error = _refuse  # type: ignore[method-assign] # it would print the usage, and exit
    given = parser.parse_args(argv)
    for override in parsed(given.overrides):
        key, group = override.key_or_group, override.key_or_group.partition("@")[0]
        if not key:
            raise PlaitError(f"{override.input_line!r} is not an override: write key=value").at(
                str(override.input_line), fits="key=value"
            )
        lists, _, name = group.partition(".")
        if override.is_delete() and lists in LISTS and key.count(".") == 1:
            raise PlaitError(f"{override.input_line}: to drop {name}, leave it out of {lists}=[...]").at(
                key, fits=f"{lists}=[...] without {name}"
            )
        if override.is_delete():
            continue
        for value in _values(override):
            if group in GROUPS:
                _check_group(group, value)
            elif key in FOLDERS and value not in FOLDERS[key]:
                raise PlaitError(
                    f"{key}={value}: Plait makes the run's folder itself, runs/<run.name>; set run.name, or start the "
                    "command in another folder"
                ).at(key, value, fits=FOLDERS[key])
            elif key in ("hydra.sweep.dir", "hydra.sweep.subdir"):
                check_sweep(str(value), key)


def check_sweep(path: str, key: str) -> None:
    """Raises PlaitError if a sweep's folder, or a job's in it, would lead to an unexpected place."""
    if ".." in PurePath(path).parts or not path.isprintable():
        raise PlaitError(f"{key}={path!r} must not lead out of its folder by '..', nor hold unprintable characters").at(
            key, path, fits="a path without '..'"
        )
    if key.endswith("subdir") and PurePath(path).is_absolute():
        raise misfit(key, path, "a folder inside hydra.sweep.dir")


def _check_group(group: str, value: Any) -> None:
    if isinstance(value, dict):
        return  # options of the node, which Hydra merges
    several = isinstance(value, list | tuple)
    names = list(value) if several else [value]
    if several and group in SINGLE:
        example = f"{group}={names[0] if len(names) == 1 else 'NAME'}"
        raise PlaitError(f"{group}={_written(value)} is a list, but a run has one {group}: {example}").at(
            group, value, fits=example
        )
    if wrong := [name for name in names if not isinstance(name, str)]:
        none = f"; leave it out, or write ~{group}, for none" if group in OPTIONAL else ""
        example = f"{group}=[NAME], or {group}=[] for none" if group in LISTS else f"{group}=NAME{none}"
        raise PlaitError(
            f"{group}={_written(value)} must name options; {_written(wrong[0])} is not a name: {example}"
        ).at(group, value, fits=example)
    if twice := [name for name, count in Counter(names).items() if count > 1]:
        raise PlaitError(f"{group}={_written(value)} names {twice[0]!r} twice").at(
            group, value, fits=f"{twice[0]!r} once"
        )


def _written(value: Any) -> str:
    return f"[{','.join(map(_written, value))}]" if isinstance(value, list) else str(value) if value else in_yaml(value)


def _values(override: Any) -> Iterable[Any]:
    """The value, or in a sweep each value that is tried."""
    value = override.value()
    if not override.is_sweep_override():
        return [value]
    return [_plain(each) for each in getattr(value, "list", ())]  # ranges and patterns are not names


def _plain(value: Any) -> Any:
    """Converts the parser's quoted text to plain text."""
    return [_plain(each) for each in value] if isinstance(value, list) else getattr(value, "text", value)


def _refuse(message: str) -> NoReturn:
    if flag := re.match(r"(?:unrecognized arguments|ambiguous option): (--?[a-zA-Z][\w-]*)", message):
        raise unknown_flag(flag[1])
    raise PlaitError(f"{message}; `plait train --help` explains the arguments")
