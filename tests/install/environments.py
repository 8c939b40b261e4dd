"""Environments that hold wheels of Plait and nothing else of it; third-party libraries are shared in."""

import shutil
import subprocess
import sys
import venv
from pathlib import Path

import attrs
import torch

from tests.helpers.commands import environment

ROOT = Path(__file__).parents[2]
PLAIT = ("pyproject.toml", "README.md", "LICENSE")  # which only requires the core and what users want beside it
PLUGINS = sorted(p.parent for p in ROOT.glob("plugins/*/pyproject.toml"))
EXAMPLES = sorted(p.parent for p in ROOT.glob("examples/*/pyproject.toml"))
STRANGER = Path(__file__).parent / "stranger"


def sources(folder: Path) -> list[Path]:
    """The core, every plugin and example of this repository and the stranger's, each alone in a folder of its own."""
    clutter = shutil.ignore_patterns("*.egg-info", "__pycache__", "build", "dist")
    (folder / "plait").mkdir()
    for name in PLAIT:
        shutil.copy2(ROOT / name, folder / "plait" / name)
    for project in (ROOT / "core", *PLUGINS, *EXAMPLES, STRANGER):
        shutil.copytree(project, folder / project.name, ignore=clutter)
    return sorted(folder.iterdir())


def build(sources_in: Path, dist: Path) -> Path:
    """A wheel of each source, built from its sdist, in `dist`."""
    for source in sources(sources_in):
        built = subprocess.run(
            [sys.executable, "-m", "build", "--no-isolation", "--outdir", dist, source], capture_output=True, text=True
        )
        assert built.returncode == 0, built.stdout[-3000:] + built.stderr[-3000:]
    return dist


@attrs.frozen
class Clean:
    """An environment of its own: the wheels, and beside them third-party libraries that are shared in."""

    folder: Path

    def run(
        self, *command: str | Path, cwd: Path, timeout: float = 300, code: int = 0
    ) -> subprocess.CompletedProcess[str]:
        env = {k: v for k, v in environment(PYTHONNOUSERSITE="1").items() if not k.startswith(("PYTHONPATH", "PLAIT_"))}
        program = self.folder / "bin" / command[0]
        done = subprocess.run(
            [program, *command[1:]], cwd=cwd, env=env, capture_output=True, text=True, timeout=timeout, check=False
        )
        assert done.returncode == code, done.stdout + done.stderr
        return done

    def install(self, *arguments: str | Path) -> None:
        options = ("--no-index", "--no-build-isolation", "--disable-pip-version-check", "--quiet")
        self.run("python", "-m", "pip", "install", *options, *arguments, cwd=self.folder)

    def train(self, *overrides: str, cwd: Path) -> str:
        return self.run("plait", "train", *overrides, cwd=cwd).stdout


def clean_environment(folder: Path, wheels: Path, *names: str) -> Clean:
    """An environment in `folder` with these distributions, from `wheels`."""
    venv.create(folder, with_pip=False, symlinks=True)
    found = Clean(folder)
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "shared.pth").write_text(str(share(folder.with_name("shared"))))
    found.install("--find-links", wheels, *names)
    return found


def share(folder: Path) -> Path:
    """A folder of links to everything that is installed here, except what is Plait's."""
    folder.mkdir()
    installed = Path(torch.__file__).parents[1]
    for entry in installed.iterdir():
        if entry.name == "hydra_plugins":  # a namespace: other packages have parts in it
            (folder / entry.name).mkdir()
            for part in entry.iterdir():
                if not part.name.startswith(("plait", "__pycache__")):
                    (folder / entry.name / part.name).symlink_to(part)
        elif not entry.name.startswith(("plait", "__editable__", "__pycache__")):
            (folder / entry.name).symlink_to(entry)
    return folder
