"""Whether this torch is newer than the newest one that this release was tested with, which its metadata names."""

import re
from importlib.metadata import PackageNotFoundError, requires

from plait.check.facts import CORE

TESTED = re.compile(r"torch==([\d.]+) *; *extra *== *['\"]tested['\"]")


def newer_torch(version: str, requirements: list[str] | None = None) -> str | None:
    """What to say if a run's torch has this version; None: nothing. requirements: those of plait-core; default: as
    they are installed."""
    if requirements is None:
        try:
            requirements = requires(CORE)
        except PackageNotFoundError:  # a copy of the code alone
            return None
    tested = next((match[1] for text in requirements or () if (match := TESTED.fullmatch(text))), None)
    if tested is None or _numbers(version) <= _numbers(tested):
        return None
    return (
        f"torch {version} is newer than {tested}, the newest that this release of Plait was tested with; "
        f"`pip install '{CORE}[tested]'` installs that one"
    )


def _numbers(version: str) -> tuple[int, ...]:
    """The release that a version belongs to: that of 2.14.0a0+git12 is 2.14.0."""
    leading = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(number) for number in leading[0].split(".")) if leading else ()
