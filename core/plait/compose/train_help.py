"""What `plait train --help` prints: conf/help.txt, the options of each group, and what conf/ says of every key."""

import shutil
import textwrap
from importlib.resources import files

from plait.compose.keys import of_a_run


def train_help() -> str:
    """The text, a template of Hydra's: "$APP_CONFIG_GROUPS" stands for the options of each group."""
    width = min(shutil.get_terminal_size((120, 24)).columns, 120)
    lines, before = [], ""
    for key in of_a_run():
        node = key.path.partition(".")[0]
        if node == "hydra" or not key.comment:
            continue
        if node != before:
            lines.append("")
        before = node
        given = f"{key.path}={key.value}" if key.value else key.path
        said = f"{given}  {key.comment}".replace("$", "$$")
        lines += textwrap.wrap(said, width, initial_indent="  ", subsequent_indent="      ", break_on_hyphens=False)
    head = files("plait.conf").joinpath("help.txt").read_text(encoding="utf-8")
    return head + "\n".join(lines).lstrip("\n") + "\n"
