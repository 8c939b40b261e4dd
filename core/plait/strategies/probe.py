"""Imports a plugin in its own interpreter to test it, so that a broken one harms no other."""

import json
import subprocess
import sys
from typing import Any

MARK = "plait-probe "  # before the answer: the imported code may print too, before and after it
SECONDS = 120


def probe(name: str, kind: str = "strategy") -> dict[str, Any]:
    """What importing the plugin `name` in a new interpreter shows: whether it is what its kind must be, or why it
    fails; of a strategy also phase, claims and hooks."""
    try:
        command = [sys.executable, "-m", "plait.strategies.probed", name, kind, MARK]
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
