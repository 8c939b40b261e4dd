"""`plait plugins`: lists installed strategies from metadata alone; --check imports each in its own process."""

import json
import sys
from pathlib import Path
from typing import Any

import plait
from plait.contract.errors import near_miss
from plait.records.text import table
from plait.strategies.probe import probe
from plait.strategies.registry import DISABLE, Plugin, disabled, installed
from plait.strategies.shipped import collisions

HELP = f"""usage: plait plugins [--json] [--check]

Lists the installed strategies: name, distribution, version, hook API and state, from metadata alone. Options of one
name in two packages are listed after them.
  --json   print JSON
  --check  import each in its own process, and show its phase, claims and hooks, or what is broken and why;
           exits with 1 if one is broken, or two options have one name
{DISABLE}=a,b blocks the strategies a and b."""


def main(argv: list[str]) -> int:
    unknown = [a for a in argv if a not in ("--json", "--check")]
    if unknown:
        print(HELP)
        return 0 if unknown[0] in ("-h", "--help") else 1
    plugins = installed()
    for name in sorted(disabled() - set(plugins)):
        guess = near_miss(name, list(plugins))
        print(f"plait: {DISABLE} names {name!r}, which is not installed{guess}", file=sys.stderr)
    rows = [_row(plugin) for plugin in plugins.values()]
    broken = False
    if "--check" in argv:
        for row in rows:
            if row["state"] == "ok":
                row.update(probe(row["name"]))
                broken |= row["state"] != "ok"
            else:
                broken |= not row["state"].startswith("disabled")
    print(json.dumps(rows, indent=2) if "--json" in argv else shown(rows))
    twice = collisions(Path(plait.__file__).parent / "conf")
    for sentence in twice:
        print(f"plait: {sentence}", file=sys.stderr)
    return int(broken or ("--check" in argv and bool(twice)))


def _row(plugin: Plugin) -> dict[str, Any]:
    return {
        "name": plugin.name,
        "distribution": plugin.distribution,
        "version": plugin.version,
        "api": plugin.api,
        "state": plugin.state,
    }


def shown(rows: list[dict[str, Any]]) -> str:
    if not rows:
        return "no strategies are installed: pip install a package that brings one"
    keys = list(dict.fromkeys(key for row in rows for key in row))
    keys.append(keys.pop(keys.index("state")))  # the longest column last
    cells = [keys, *([_cell(row.get(key)) for key in keys] for row in rows)]
    return "\n".join(table(cells))


def _cell(value: Any) -> str:
    if isinstance(value, list):
        return ",".join(value) or "-"
    return "-" if value is None else str(value)
