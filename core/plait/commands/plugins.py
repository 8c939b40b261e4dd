"""`plait plugins`: lists installed plugins from metadata alone; --check imports each in its own process."""

import sys
from typing import TYPE_CHECKING, Any

import plait
from plait.contract.errors import near_miss
from plait.contract.kinds import KINDS

if TYPE_CHECKING:
    from argparse import Namespace

    from plait.commands.arguments import Parser
    from plait.strategies.registry import Plugin

help = "list the installed plugins of every kind"


def arguments(parser: "Parser") -> None:
    from plait.strategies.registry import DISABLE

    parser.description = """\
Lists the installed plugins of every kind: name, distribution, version, hook API and state, from metadata alone.
Options of one name in two packages are listed after them."""
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--check",
        action="store_true",
        help="""import each in its own process, and show what is broken and why, of a strategy also its phase, claims
        and hooks; exits with 1 if one is broken, or two options have one name""",
    )
    parser.add_argument("--kind", metavar="KIND", choices=list(KINDS), help="only the plugins of this kind")
    parser.epilog = f"{DISABLE}=a,b blocks the plugins a and b."


def run(args: "Namespace") -> int:
    from pathlib import Path

    from plait.strategies.probe import probe
    from plait.strategies.registry import DISABLE, disabled, everything
    from plait.strategies.shipped import collisions

    plugins = [plugin for of_a_kind in everything().values() for plugin in of_a_kind.values()]
    names = {plugin.name for plugin in plugins}
    for name in sorted(disabled() - names):
        guess = near_miss(name, sorted(names))
        print(f"plait: {DISABLE} names {name!r}, which is not installed{guess}", file=sys.stderr)
    rows = [_row(plugin) for plugin in plugins if args.kind in (None, plugin.kind)]
    broken = False
    if args.check:
        for row in rows:
            if row["state"] == "ok":
                row.update(probe(row["name"], row["kind"]))
                broken |= row["state"] != "ok"
            else:
                broken |= not row["state"].startswith("disabled")
    if args.json:
        import json

        print(json.dumps(rows, indent=2))
    else:
        print(shown(rows))
    twice = collisions(Path(plait.__file__).parent / "conf")
    for sentence in twice:
        print(f"plait: {sentence}", file=sys.stderr)
    return int(broken or (args.check and bool(twice)))


def _row(plugin: "Plugin") -> dict[str, Any]:
    return {
        "name": plugin.name,
        "kind": plugin.kind,
        "distribution": plugin.distribution,
        "version": plugin.version,
        "api": plugin.api,
        "state": plugin.state,
    }


def shown(rows: list[dict[str, Any]]) -> str:
    if not rows:
        return "no such plugins are installed: pip install a package that brings one"
    keys = list(dict.fromkeys(key for row in rows for key in row))
    keys.append(keys.pop(keys.index("state")))  # the longest column last
    cells = [keys, *([_cell(row.get(key)) for key in keys] for row in rows)]
    from plait.records.text import table

    return "\n".join(table(cells))


def _cell(value: Any) -> str:
    if isinstance(value, list):
        return ",".join(value) or "-"
    return "-" if value is None else str(value)
