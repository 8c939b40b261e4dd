"""`plait new NAME`: writes a package with a working plugin from the templates beside this file."""

import importlib.util
import keyword
import os
import re
from importlib import metadata
from typing import TYPE_CHECKING, Any

from plait import PlaitError
from plait.host import plugins, writing

if TYPE_CHECKING:
    from argparse import Namespace
    from pathlib import Path

    from plait.host import Parser

help = "write a package with a working plugin, as a start for your own"
TEMPLATE = os.path.join(os.path.dirname(__file__), "kinds")
NAME = re.compile(r"[a-z][a-z0-9]*([-_][a-z0-9]+)*")
DOES = {  # what the plugin of each kind does, as "It ..."
    "strategy": "holds copies of the model that sum their gradients",
    "model": "is a decoder with learned positions, small enough to try",
    "source": "gives rows of numbers that count upwards",
    "optimizer": "moves each parameter by the sign of its gradient",
    "schedule": "lets the learning rate fall in stairs",
    "loss": "is cross-entropy that gives a share of each label to all entries of the vocabulary",
    "observer": "logs the norm of the weights, and ends a run if it grows too large",
    "sink": "writes the losses of a run into a table",
    "command": "shows the last row of a run",
    "hookspecs": "specifies a hook of that name for strategies, and logs what they answer",
    "pruner": "prunes runs of a sweep that see few tokens for their model",
    "launcher": "makes ranks of the processes that mpirun of MPICH started",
}


def arguments(parser: "Parser") -> None:
    parser.description = """\
Writes a package with a working plugin NAME into the folder plait-NAME: it installs, and has options, tests, a README,
and workflows that test and publish it. NAME is in lower case, such as ring or my-idea; in Python "-" becomes "_"."""
    parser.add_argument("name", metavar="NAME")
    parser.add_argument(
        "--kind", metavar="KIND", choices=list(DOES), default="strategy", help=f"{', '.join(DOES)} (default: strategy)"
    )
    parser.epilog = "Needs copier: pip install 'plait-testing[author]'."


def run(args: "Namespace") -> int:
    from pathlib import Path

    kind, name = args.kind, checked(args.name, args.kind)
    folder = write(name, Path.cwd(), kind)
    print(f"{folder.name}/ holds the {kind} {name!r}, which works: it {DOES[kind]}.")
    print(f"  pip install -e './{folder.name}[test]' && pytest {folder.name}")
    print(f"  {use(name, kind)}")
    print(f"  then make it yours: {folder.name}/src/plait_{name}/__init__.py")
    return 0


def use(name: str, kind: str) -> str:
    """A command that uses the plugin."""
    special = {
        "command": f"plait {name} runs/NAME",
        "launcher": f"mpirun -n 2 plait train launch.mode={name} 'strategy=[NAME]'",
        "pruner": "plait train -m sweep.prune=true train.seq_len=16,1024 train.steps=1",
    }
    choice, several = _choice(kind), kind == "hookspecs" or plugins.KINDS[kind].several
    return special.get(kind) or "plait train " + (f"'{choice}=[{name}]'" if several else f"{choice}={name}")


def _choice(kind: str) -> str:
    """The group of options of the package, "" without one. What asks a hook of its own is an observer."""
    return "observer" if kind == "hookspecs" else plugins.KINDS[kind].choice


def checked(name: str, kind: str = "strategy") -> str:
    """`name` as an identifier. Raises PlaitError if it cannot be one, or is taken."""
    identifier = name.replace("-", "_")
    if not NAME.fullmatch(name) or keyword.iskeyword(identifier) or keyword.iskeyword(identifier.capitalize()):
        raise PlaitError(
            f"{name!r} cannot name a plugin; use lower-case letters, digits and single - or _ between them, "
            "starting with a letter, and no Python keyword, such as ring or my-strategy"
        )
    if identifier in plugins.KINDS[kind].words:
        raise PlaitError(f"{plugins.KINDS[kind].key}={identifier} means something else; choose another name")
    if identifier in (known := plugins.installed(kind)):
        raise PlaitError(f"{known[identifier]} is installed already; choose another name")
    if importlib.util.find_spec(f"plait_{identifier}"):
        raise PlaitError(f"a package plait_{identifier} is installed already; choose another name")
    return identifier


def write(name: str, parent: "Path", kind: str = "strategy") -> "Path":
    """Write a package with the plugin `name` of this kind into a new folder in `parent`, and return the folder. Raises
    PlaitError if it exists.

    Needs neither a network nor git.
    """
    import shutil

    folder = parent / f"plait-{name.replace('_', '-')}"
    if folder.exists() or folder.is_symlink():
        raise PlaitError(f"{folder.name} exists already; remove it, take another name or another folder")
    try:
        import copier
    except ImportError:
        raise PlaitError(
            "plait new needs copier, which is not installed: pip install 'plait-testing[author]'"
        ) from None
    with writing(folder):
        try:
            copier.run_copy(TEMPLATE, folder, data=_answers(name, kind), defaults=True, quiet=True)
        except OSError:
            shutil.rmtree(folder, ignore_errors=True)
            raise
    return folder


def _answers(name: str, kind: str) -> dict[str, Any]:
    """What the template of this kind is filled in with."""
    major, minor, *_ = (int(part) for part in metadata.version("plait-core").split("."))
    core = f">={major}.{minor},<{major}.{minor + 1}"
    package, cls = f"plait_{name}", "".join(map(str.capitalize, name.split("_")))
    kinds = plugins.KINDS
    points = {kinds[kind].group: f"{package}:{cls}" if kinds[kind].target == "MODULE:CLASS" else package}
    if kind == "hookspecs":
        points[kinds["observer"].group] = f"{package}:{cls}"
    if kind == "strategy":
        points["plait.api"] = f"v{plugins.API}"
    project = package.replace("_", "-")
    graded = name if kind in ("strategy", "model", "optimizer") else ""  # whose grade its suite writes
    words = {"kind": kind, "does": DOES[kind], "use": use(name, kind), "choice": _choice(kind), "points": points}
    names = {"name": name, "class": cls, "package": package, "project": project, "core": core, "graded": graded}
    return words | names
