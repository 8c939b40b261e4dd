"""Runs the quick tests of what is changed: the second half of `make check`.

Changed is what differs from the branch main, or on main itself from its last commit. Changes inside packages (plugins/,
examples/) run the quick tests of these alone: what is built on them is tested by `make test`. Any other change also
runs the rooms of the core that need no ranks, the step, and one layout of one strategy, and so does no change at all.
"""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("plugins", "examples")
CORE = ("tests/contract", "tests/strategies", "tests/system", "tests/records", "tests/parallel/test_step.py")
ONE_LAYOUT = ("plugins/fsdp2/tests/test_conformance.py", "-k", "shards and not copies and not 4")
WORDS = (".md", ".svg", ".png")  # their tests take longer than a quick look may: `make test` runs them


def changed(root: Path = ROOT) -> list[str]:
    """Paths of files, relative to the root, that are not as main has them."""

    def git(*arguments: str) -> list[str]:
        done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, encoding="utf-8", check=False)
        return done.stdout.splitlines() if done.returncode == 0 else []

    base = next(iter(git("merge-base", "HEAD", "main")), "HEAD")
    return [*git("diff", "--name-only", base), *git("ls-files", "--others", "--exclude-standard")]


def selected(paths: list[str], root: Path = ROOT) -> list[tuple[str, ...]]:
    """The arguments of each run of pytest for these changes."""
    code = [path for path in paths if not path.endswith(WORDS)]
    if paths and not code:
        return []
    packages = sorted({"/".join(path.split("/")[:2]) for path in code if path.startswith(PACKAGES)})
    own = [f"{package}/tests" for package in packages if (root / package / "tests").is_dir()]
    runs: list[tuple[str, ...]] = [tuple(own)] if own else []
    if not own or any(not path.startswith(PACKAGES) for path in code):
        runs += [CORE, ONE_LAYOUT]
    return runs


def main() -> int:
    runs = selected(changed())
    if not runs:
        print("check: only pages are changed; `make test` tests them")
    environ = os.environ | {"OMP_NUM_THREADS": "1"}
    for arguments in runs:
        command = [sys.executable, "-m", "pytest", "-n", "2", "--dist", "loadgroup", *arguments]
        if code := subprocess.run(command, cwd=ROOT, env=environ, check=False).returncode:
            return code
    return 0


if __name__ == "__main__":
    sys.exit(main())
