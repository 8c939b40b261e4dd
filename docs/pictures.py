"""Writes images/plan.svg, what README's `plait plan` command prints: `python docs/pictures.py`."""

import io
import re
import shlex
import subprocess
import sys
from pathlib import Path

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from rich.text import Text

ROOT = Path(__file__).resolve().parents[1]
PLAN = ROOT / "docs" / "images" / "plan.svg"
COMMAND = re.compile(r"^plait plan [^#]*?(?=  +#|$)", re.MULTILINE)
FONT = re.compile(r"@font-face \{\{.*?\}\}", re.DOTALL)  # rich would fetch it from a network


def command() -> str:
    """The first `plait plan` of README."""
    found = COMMAND.search((ROOT / "README.md").read_text(encoding="utf-8").replace("\\\n", ""))
    assert found, "README has no plait plan"
    return " ".join(found[0].split())


def picture(title: str, text: str) -> str:
    """A terminal with this text, as SVG that needs no network."""
    width = max(map(len, text.splitlines()))
    console = Console(record=True, width=width, file=io.StringIO())
    console.print(Text(text))
    return console.export_svg(title=title, code_format=FONT.sub("", CONSOLE_SVG_FORMAT))


def main() -> None:
    asked = command()
    done = subprocess.run(
        [Path(sys.executable).with_name("plait"), *shlex.split(asked)[1:]],
        capture_output=True,
        text=True,
        check=True,
        encoding="utf-8",
    )
    PLAN.write_text(picture("plait plan", done.stdout), encoding="utf-8")


if __name__ == "__main__":
    main()
