"""Shell completion: Hydra completes the overrides, but does not know that a subcommand comes before them."""

import os
from collections.abc import Collection

from plait.contract.errors import PlaitError


def complete(arguments: list[str], commands: Collection[str]) -> int:
    """Answer `plait -sc install=SHELL`, `uninstall=SHELL` or `query=SHELL`; a query reads its line from COMP_LINE."""
    from plait.compose.compose import composed

    asked = [a for a in arguments if a not in commands]
    querying = any(a.startswith("query=") for a in asked)
    if querying:
        app, *words = os.environ.get("COMP_LINE", "").split(" ")
        if len(words) < 2:
            print("\n".join(name for name in commands if name.startswith("".join(words))))
            return 0
        os.environ["COMP_LINE"] = " ".join([app, *words[1:]])
    try:
        composed(lambda cfg: None, asked)
    except PlaitError:  # an unfinished line may not compose
        if not querying:
            raise
    return 0
