"""Completion in the shell: Hydra knows the overrides, but not that a subcommand stands before them."""

import os

from plait.contract.errors import PlaitError


def main(arguments: list[str]) -> int:
    """Answer `plait -sc install=SHELL`, `uninstall=SHELL` or `query=SHELL`; a query finds its line in COMP_LINE."""
    from plait.commands.main import COMMANDS
    from plait.launch.compose import composed

    asked = [a for a in arguments if a not in COMMANDS]
    querying = any(a.startswith("query=") for a in asked)
    if querying:
        app, *words = os.environ.get("COMP_LINE", "").split(" ")
        if len(words) < 2:
            print("\n".join(name for name in COMMANDS if name.startswith("".join(words))))
            return 0
        os.environ["COMP_LINE"] = " ".join([app, *words[1:]])
    try:
        composed(lambda cfg: None, asked)
    except PlaitError:  # half a line may well not compose
        if not querying:
            raise
    return 0
