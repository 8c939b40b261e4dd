"""The grid with another transformers than that of the environment, and which families end in another way with it."""

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from datetime import date
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
BEGIN, END = "<!-- other releases: written by `make grid` -->", "<!-- the end of the other releases -->"


def again_with(wanted: str, arguments: list[str]) -> int:
    """The exit code of the grid, run with the transformers that `wanted` names: a version, or what pip takes, such as a
    folder of its source or an address of git. It lies in its own folder, before the packages of this environment."""
    folder = ROOT / f".transformers-{re.sub(r'[^0-9A-Za-z.]+', '-', wanted).strip('-')}"
    if not (folder / "transformers").exists():
        named = f"transformers=={wanted}" if re.fullmatch(r"[0-9][0-9A-Za-z.]*", wanted) else wanted
        install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", f"--target={folder}", named]
        subprocess.run(install, check=True)
    path = os.pathsep.join(part for part in (str(folder), os.environ.get("PYTHONPATH", "")) if part)
    command = [sys.executable, str(Path(__file__).with_name("grid.py")), *arguments, "--beside-the-page"]
    return subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, check=False).returncode


def changed(before: Mapping[str, Any], now: Mapping[str, Any], version: str) -> list[str]:
    """A line that says how many families ended as in the table `before`, and one for each that did not.

    before, now: family -> strategy -> `grid.Outcome`.
    """
    lines = []
    for kind, found in now.items():
        was, is_now = (_words(by.get(kind)) for by in (before, now))
        if was != is_now:
            note = found[""].note if "" in found else ""
            lines.append(f"- {kind}: {was} -> {is_now}{f' ({note})' if note else ''}")
    same = len(now) - len(lines)
    return [f"transformers {version}, {date.today()}: {same} of {len(now)} families end as in the table.", "", *lines]


def write(page: Path, lines: list[str]) -> None:
    """Put `lines` between the marks of `page`."""
    before, _, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    text = "\n".join(lines).strip()
    page.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{rest.partition(END)[2]}", encoding="utf-8")


def _words(found: Mapping[str, Any] | None) -> str:
    if found is None:
        return "not there"
    return ", ".join(f"{name} {one.said}".strip() for name, one in found.items())
