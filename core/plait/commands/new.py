"""`plait new NAME`: writes a plugin with a working strategy from the template beside this file."""

import importlib.util
import keyword
import os
import re
from typing import TYPE_CHECKING

from plait import __version__
from plait.contract.errors import PlaitError

if TYPE_CHECKING:
    from argparse import Namespace
    from pathlib import Path

    from plait.commands.arguments import Parser

help = "write a plugin with a working strategy, as a start for your own"
TEMPLATE = os.path.join(os.path.dirname(__file__), "template")
NAME = re.compile(r"[a-z][a-z0-9]*([-_][a-z0-9]+)*")


def arguments(parser: "Parser") -> None:
    parser.description = """\
Writes a plugin into the folder plait-NAME: an installable package with a working strategy NAME, its options, tests,
README and CI workflow. NAME is in lower case, such as ring or my-strategy; in Python "-" becomes "_"."""
    parser.add_argument("name", metavar="NAME")
    parser.epilog = "Needs copier: pip install 'plait[author]'."


def run(args: "Namespace") -> int:
    from pathlib import Path

    strategy = checked(args.name)
    folder = write(strategy, Path.cwd())
    print(f"{folder.name}/ holds the strategy {strategy!r}, which works: copies of the model that sum their gradients.")
    print(f"  pip install -e './{folder.name}[test]' && pytest {folder.name}")
    print(f"  plait train 'strategy=[{strategy}]'")
    print(f"  then make it yours: {folder.name}/src/plait_{strategy}/__init__.py")
    return 0


def checked(name: str) -> str:
    """`name` as an identifier. Raises PlaitError if it cannot be one, or is taken."""
    from plait.strategies.registry import installed

    strategy = name.replace("-", "_")
    if not NAME.fullmatch(name) or keyword.iskeyword(strategy) or keyword.iskeyword(strategy.capitalize()):
        raise PlaitError(
            f"{name!r} cannot name a strategy; use lower-case letters, digits and single - or _ between them, "
            "starting with a letter, and no Python keyword, such as ring or my-strategy"
        )
    if strategy in (plugins := installed()):
        raise PlaitError(f"{plugins[strategy]} is installed already; choose another name")
    if importlib.util.find_spec(f"plait_{strategy}"):
        raise PlaitError(f"a package plait_{strategy} is installed already; choose another name")
    return strategy


def write(strategy: str, parent: "Path") -> "Path":
    """Write the plugin of `strategy` into a new folder in `parent`, and return the folder. Raises PlaitError if it
    exists.

    Needs neither a network nor git.
    """
    import shutil

    from plait.contract.hookspecs import API
    from plait.system.disk import writing

    folder = parent / f"plait-{strategy.replace('_', '-')}"
    if folder.exists() or folder.is_symlink():
        raise PlaitError(f"{folder.name} exists already; remove it, take another name or another folder")
    try:
        import copier
    except ImportError:
        raise PlaitError("plait new needs copier, which is not installed: pip install 'plait[author]'") from None
    major, minor, *_ = (int(part) for part in __version__.split("."))
    data = {"strategy": strategy, "core": f">={major}.{minor},<{major}.{minor + 1}", "api": API}
    with writing(folder):
        try:
            copier.run_copy(TEMPLATE, folder, data=data, defaults=True, quiet=True)
        except OSError:
            shutil.rmtree(folder, ignore_errors=True)
            raise
    return folder
