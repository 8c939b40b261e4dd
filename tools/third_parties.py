"""Runs the suites of packages of others against this checkout: `make third-parties`, or with a list of one's own,
`python -m tools.third_parties LIST FOLDER`.

Each package gets an environment of its own, over the one of this checkout: pip installs it and what it lacks, and
pytest runs its tests. FOLDER gets the grades of its suites, and NAME.plugins.json: its plugins, as `plait plugins
--check --json` tells of them. The exit code is 1 if a package failed.
"""

import json
import os
import re
import subprocess
import sys
import sysconfig
import tempfile
import tomllib
import venv
from pathlib import Path

import attrs

ROOT = Path(__file__).resolve().parents[1]
LIST = ROOT / "docs" / "board" / "third-parties.toml"
GRADES = ROOT / "build" / "board"
MINUTES = 60  # for all tests of a package


class FailedError(Exception):
    """One sentence: why a package has no grade."""


@attrs.frozen
class Package:
    """source: what pip installs: a folder, or `git+ADDRESS@TAG`. tests: the folder in it that pytest runs."""

    name: str
    source: str
    tests: str = "tests"


def listed(path: Path) -> list[Package]:
    """Raises FailedError for a list that is none."""
    try:
        packages = tomllib.loads(path.read_text(encoding="utf-8"))
        return [Package(name, **told) for name, told in packages.items()]
    except (OSError, tomllib.TOMLDecodeError, TypeError) as error:
        raise FailedError(f"{path}: {error}; a package is [NAME] with source, and tests if it is not 'tests'") from None


def grade(package: Package, grades: Path, scratch: Path) -> None:
    """Write the grades of the package's suites. Raises FailedError."""
    source = fetched(package.source, scratch)
    folder = scratch / "venv"
    venv.create(folder, with_pip=False, symlinks=True)
    (site,) = folder.glob("lib/python*/site-packages")
    # Also runs the .pth files there, of what is installed as folders of the checkout.
    (site / "checkout.pth").write_text(
        f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n", encoding="utf-8"
    )
    python = folder / "bin" / "python"
    pip = (python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-build-isolation")
    run(*pip, f"{source}[test]", cwd=scratch, minutes=15)
    listing = run(python, "-m", "plait", "plugins", "--check", "--json", cwd=scratch, minutes=15, codes=(0, 1))
    plugins = [row for row in json.loads(listing) if row["distribution"] == package.name]
    if not plugins:
        raise FailedError(f"{package.source} brings no plugin of a distribution {package.name}")
    grades.mkdir(parents=True, exist_ok=True)
    (grades / f"{package.name}.plugins.json").write_text(json.dumps(plugins) + "\n", encoding="utf-8")
    tests = source / package.tests
    if not tests.is_dir():
        raise FailedError(f"{package.source} has no folder {package.tests}")
    command = (python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not gpu", "--plait-grade", grades, tests)
    run(*command, cwd=source, minutes=MINUTES)


def fetched(source: str, scratch: Path) -> Path:
    """The folder with the package's source."""
    if not source.startswith("git+"):
        folder = (ROOT / source).resolve()
        if not folder.is_dir():
            raise FailedError(f"{source} is no folder; give a folder, or git+ADDRESS@TAG")
        return folder
    address, _, tag = source.removeprefix("git+").rpartition("@")
    if not re.fullmatch(r"[\w./-]+", tag) or "://" not in address:
        raise FailedError(f"{source} has no tag; give git+ADDRESS@TAG, so that a result belongs to one version")
    run("git", "clone", "--quiet", "--depth", "1", "--branch", tag, address, scratch / "source", cwd=scratch, minutes=5)
    return scratch / "source"


def run(*command: str | Path, cwd: Path, minutes: float, codes: tuple[int, ...] = (0,)) -> str:
    """What the command prints. Raises FailedError with the end of that if its exit code is not among `codes`."""
    environ = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")} | {"OMP_NUM_THREADS": "1"}
    try:
        done = subprocess.run(
            command, cwd=cwd, env=environ, capture_output=True, encoding="utf-8", timeout=60 * minutes, check=False
        )
    except subprocess.TimeoutExpired:
        raise FailedError(f"`{Path(command[0]).name} {command[2]} ...` took more than {minutes} minutes") from None
    if done.returncode not in codes:
        raise FailedError(f"`{Path(command[0]).name} {command[2]} ...` failed:\n{(done.stdout + done.stderr)[-3000:]}")
    return done.stdout


def main(arguments: list[str]) -> int:
    if len(arguments) not in (0, 2):
        print("third-parties: give a list and a folder for grades, or neither", file=sys.stderr)
        return 1
    path, grades = (Path(each).resolve() for each in arguments) if arguments else (LIST, GRADES)
    failed = 0
    try:
        packages = listed(path)
    except FailedError as error:
        print(f"third-parties: {error}", file=sys.stderr)
        return 1
    for package in packages:
        print(f"{package.name}: {package.source}", flush=True)
        with tempfile.TemporaryDirectory() as scratch:
            try:
                grade(package, grades, Path(scratch))
                print(f"{package.name}: passed", flush=True)
            except FailedError as error:
                failed += 1
                print(f"{package.name}: {error}", flush=True)
    print(f"third-parties: {len(packages) - failed} of {len(packages)} passed; grades are in {grades}")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
