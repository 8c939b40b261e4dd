"""Imports a strategy in its own interpreter to test it, so that a broken one harms no other."""

import json
import subprocess
import sys
from typing import Any

MARK = "plait-probe "  # before the answer: the imported code may print too, before and after it
PROBE = """
import json, sys
import attrs
from plait.strategies.hooks import Hooks
from plait.strategies.registry import load
from plait.strategies.order import traits
from plait.contract import hookspecs
from plait.contract.errors import PlaitError
name = sys.argv[1]
try:
    cls = load(name)
    strategy = object.__new__(cls)  # options that must be given are not known here
    for field in attrs.fields(cls):
        object.__setattr__(strategy, field.name, None)
    hooks = Hooks({name: strategy})
    hooks = [h for h in dir(hookspecs) if hasattr(getattr(hookspecs, h), "plait_spec") and hooks.implemented(h)]
    own = traits(name, strategy)
    answer = {"state": "ok", "phase": own.phase, "claims": sorted(own.claims), "numerics": own.numerics, "hooks": hooks}
    if "torch" in sys.modules:
        answer["state"] = "imports torch when it is imported: move that into the methods"
except PlaitError as error:
    answer = {"state": str(error)}
except Exception as error:
    answer = {"state": f"{type(error).__name__}: {error}"}
print("\\n" + sys.argv[2] + json.dumps(answer))
"""
SECONDS = 120


def probe(name: str) -> dict[str, Any]:
    """What importing the strategy `name` in a new interpreter shows: phase, claims, hooks, or why it fails."""
    try:
        command = [sys.executable, "-c", PROBE, name, MARK]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=SECONDS, errors="replace", encoding="utf-8"
        )
    except subprocess.TimeoutExpired:
        return {"state": f"the interpreter that imported it was not done after {SECONDS} s"}
    answers = [line.removeprefix(MARK) for line in done.stdout.splitlines() if line.startswith(MARK)]
    if answers:
        return json.loads(answers[-1])
    last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
    return {"state": f"the interpreter that imported it died: {last}"}
