"""Imports the plugin NAME and prints what it shows: `python -m plait.strategies.probed NAME KIND MARK`."""

import json
import sys
from typing import Any

import attrs

from plait.contract.errors import PlaitError
from plait.strategies.order import traits
from plait.strategies.plugins import hooks
from plait.strategies.registry import load


def shown(name: str, kind: str) -> dict[str, Any]:
    """The state of the plugin, "ok" or what is wrong; of a strategy that is fine also its phase, claims, numerics and
    hooks."""
    try:
        cls = load(name, kind)
        if kind != "strategy":
            return {"state": "ok"}
        strategy: Any = object.__new__(cls)  # options that must be given are not known here
        for field in attrs.fields(cls):
            object.__setattr__(strategy, field.name, None)
        own = traits(name, strategy)
        answer = {"state": "ok", "phase": own.phase, "claims": sorted(own.claims), "numerics": own.numerics}
        answer["hooks"] = sorted(hooks(name, strategy))
    except PlaitError as error:
        return {"state": str(error)}
    except Exception as error:
        return {"state": f"{type(error).__name__}: {error}"}
    if "torch" in sys.modules:
        answer["state"] = "imports torch when it is imported: move that into the methods"
    return answer


if __name__ == "__main__":
    print(f"\n{sys.argv[3]}{json.dumps(shown(*sys.argv[1:3]))}")
