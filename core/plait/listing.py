"""`plait plugins`: what is installed, from metadata alone; with --check each is imported in a process of its own."""

import json
import subprocess
import sys
from typing import Any

from plait.errors import near_miss
from plait.plugins import DISABLE, Plugin, disabled, installed

HELP = f"""usage: plait plugins [--json] [--check]

Lists the installed strategies: name, distribution, version, hook API and state, from metadata alone.
  --json   the same as JSON
  --check  import each in a process of its own: its stage, claims and hooks, or what is broken and why;
           exits with 1 where one is
{DISABLE}=a,b blocks the strategies a and b."""

# Runs in a fresh interpreter, so that one broken plugin harms no other; prints JSON on its last line.
PROBE = """
import json, sys
import attrs
from plait.braid import Braid
from plait.plugins import load
from plait.strategy import traits
from plait import hookspecs
from plait.errors import PlaitError
name = sys.argv[1]
try:
    cls = load(name)
    strategy = object.__new__(cls)  # options that must be given are not known here
    for field in attrs.fields(cls):
        object.__setattr__(strategy, field.name, None)
    braid = Braid({name: strategy})
    hooks = [h for h in dir(hookspecs) if hasattr(getattr(hookspecs, h), "plait_spec") and braid.owners(h)]
    own = traits(name, strategy)
    answer = {"state": "ok", "stage": own.stage, "claims": sorted(own.claims), "numerics": own.numerics, "hooks": hooks}
    if "torch" in sys.modules:
        answer["state"] = "imports torch when it is imported: move that into the methods"
except PlaitError as error:
    answer = {"state": str(error)}
except Exception as error:
    answer = {"state": f"{type(error).__name__}: {error}"}
print(json.dumps(answer))
"""


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
    print(json.dumps(rows, indent=2) if "--json" in argv else table(rows))
    return int(broken)


def _row(plugin: Plugin) -> dict[str, Any]:
    return {
        "name": plugin.name,
        "distribution": plugin.distribution,
        "version": plugin.version,
        "api": plugin.api,
        "state": plugin.state,
    }


def probe(name: str) -> dict[str, Any]:
    """What importing the strategy `name` in a fresh interpreter tells: stage, claims, hooks, or the reason it fails."""
    done = subprocess.run([sys.executable, "-c", PROBE, name], capture_output=True, text=True, timeout=120)
    lines = done.stdout.strip().splitlines()
    if done.returncode == 0 and lines:
        return json.loads(lines[-1])
    last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
    return {"state": f"the interpreter that imported it died: {last}"}


def table(rows: list[dict[str, Any]]) -> str:
    if not rows:
        return "no strategies are installed: pip install a package that brings one"
    keys = list(dict.fromkeys(key for row in rows for key in row))
    keys.append(keys.pop(keys.index("state")))  # the long one last
    cells = [keys, *([_cell(row.get(key)) for key in keys] for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(keys))]
    return "\n".join("  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip() for line in cells)


def _cell(value: Any) -> str:
    if isinstance(value, list):
        return ",".join(value) or "-"
    return "-" if value is None else str(value)
