"""What a page of documentation asks its reader to write and to run.

A fenced block whose first line (or second, after Hydra's `# @package`) is a comment that names a file is that file. Any
other `python` block is a complete script. Of a `sh` block the lines that begin with plait, torchrun or pytest are run.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import attrs

from plait_testing.project import Done, environment
from tests.helpers.commands import plait

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md")), *sorted(ROOT.glob("plugins/*/README.md"))]
SOME = ROOT / "tests" / "helpers" / "some.py"
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NAME = re.compile(r"(?:# @package \S+\n)?# (\S+\.\w+)\n")
BIN = Path(sys.executable).parent

# Appended to a `plait train` that does not say train.steps, so that it ends within seconds.
SHORT = (
    *("train.steps=2", "train.seq_len=64", "train.local_batch_size=2", "schedule.warmup_steps=1"),
    *("validation.batches=1", "metrics.tensorboard=false"),
)


@attrs.frozen
class Block:
    language: str
    text: str

    @property
    def file(self) -> str | None:
        found = NAME.match(self.text)
        return found[1] if found else None


def blocks(page: Path) -> list[Block]:
    return [Block(*found) for found in FENCE.findall(page.read_text())]


def steps(page: Path) -> list[list[str]]:
    """The commands that a reader runs, in order."""
    found = []
    for block in blocks(page):
        if block.language == "python" and not block.file:
            found.append([sys.executable, "-c", block.text])
        if block.language == "sh":
            lines = [shlex.split(line, comments=True) for line in block.text.replace("\\\n", " ").splitlines()]
            found += [line for line in lines if line and line[0] in ("plait", "torchrun", "pytest")]
    return found


def write_files(page: Path, folder: Path) -> None:
    """Write the page's files; a package among them is installed into `folder/site`."""
    for block in blocks(page):
        if block.file:
            path = folder / block.file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block.text)
    for project in folder.glob("*/pyproject.toml"):
        for conf in [c for c in project.parent.rglob("conf") if c.is_dir()]:
            for package in [conf, *(child for child in conf.iterdir() if child.is_dir())]:
                (package / "__init__.py").touch()
        options = ["--quiet", "--no-deps", "--no-build-isolation", "--disable-pip-version-check"]
        command = [sys.executable, "-m", "pip", "install", *options, "--target", str(folder / "site")]
        subprocess.run([*command, str(project.parent)], check=True)


def run(step: list[str], folder: Path, timeout: float = 900) -> str:
    """What the command prints; AssertionError where it does not end with 0, or a plan of what does not fit with 3."""
    if step[:2] == ["plait", "train"] and not any(a.startswith("train.steps=") or a.startswith("--") for a in step):
        step = [*step, *SHORT]
    if step[0] == "pytest":  # a suite, which runs whole where its plugin lies
        (folder / "site").mkdir(exist_ok=True)
        shutil.copy(SOME, folder / "site")
        step = [*step, "-m", "not slow", "-p", "some"]
    path = {"PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": str(folder / "site")}
    if step[0] == "plait":
        done = plait(*step[1:], cwd=folder, timeout=timeout, **path)
    else:
        env = environment(**path)
        ran = subprocess.run(step, cwd=folder, env=env, capture_output=True, text=True, timeout=timeout, check=False)
        done = Done(ran.returncode, ran.stdout, ran.stderr)
    assert done.code in ((0, 3) if step[:2] == ["plait", "plan"] else (0,)), f"{shlex.join(step)}\n{done.out}{done.err}"
    return done.out
