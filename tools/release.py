"""Makes a release ready: `make release VERSION=x.y.z`.

It sets the version of every package and what they require of each other, writes CHANGELOG.md from changes/, builds a
wheel and an sdist of each package into dist/VERSION, and checks them. All this happens in a clone; the tree changes
only if it worked. Nothing is committed and nothing is uploaded.
"""

import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

from packaging.version import Version

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("core/pyproject.toml", "pyproject.toml", "plugins/*/pyproject.toml", "examples/*/pyproject.toml")
SHOWN = ("docs/compatibility.md", "docs/kinds.md", "docs/strategies.md")  # pages that show a requirement of Plait
INIT = "core/plait/__init__.py"


class RefusedError(Exception):
    """One sentence: why there is no release."""


def run(*command: str | Path, cwd: Path) -> str:
    """What the command prints; RefusedError with the end of its output if it fails."""
    done = subprocess.run(command, cwd=cwd, capture_output=True, encoding="utf-8", check=False)
    if done.returncode:
        words = " ".join(str(word) for word in command[:4])
        raise RefusedError(f"`{words} ...` failed: {(done.stdout + done.stderr)[-2000:].strip()}")
    return done.stdout


def projects(tree: Path) -> list[Path]:
    """The pyproject.toml of every package."""
    return [path for pattern in PACKAGES for path in sorted(tree.glob(pattern))]


def version_of(tree: Path) -> Version:
    return Version(tomllib.loads((tree / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"])


def checked(tree: Path, text: str) -> Version:
    """The version that the text means; RefusedError if it cannot be released from the tree."""
    if not re.fullmatch(r"(0|[1-9]\d*)(\.(0|[1-9]\d*)){2}", text):
        raise RefusedError(f"VERSION={text} is no version; give three numbers, such as VERSION=0.2.0")
    wanted, now = Version(text), version_of(tree)
    is_released = f"\n## {now} " in (tree / "CHANGELOG.md").read_text(encoding="utf-8")
    if wanted < now or (wanted == now and is_released):
        raise RefusedError(f"VERSION={text} is not newer than {now}{', which is released' if is_released else ''}")
    if changed := run("git", "status", "--porcelain", cwd=tree).splitlines():
        raise RefusedError(f"the tree has changes ({changed[0].strip()}, {len(changed)} in all): commit or remove them")
    return wanted


def bounds(version: Version) -> str:
    """What a package requires of another: the same minor version, as `plait new` writes it too."""
    return f">={version.major}.{version.minor},<{version.major}.{version.minor + 1}"


def replace(path: Path, pattern: str, new: str, at_least: int) -> None:
    text = path.read_text(encoding="utf-8")
    text, count = re.subn(pattern, new, text, flags=re.MULTILINE)
    if count < at_least:
        raise RefusedError(f"{path} has no {pattern}")
    path.write_text(text, encoding="utf-8")


def set_versions(tree: Path, version: Version) -> None:
    for path in projects(tree):
        replace(path, r'^version = ".*"$', f'version = "{version}"', at_least=1)
    for path in [*projects(tree), *(tree / name for name in SHOWN)]:
        required = 0 if path == tree / "core/pyproject.toml" else 1
        replace(path, r"\b(plait[\w-]*)>=[\d.]+,<[\d.]+", rf"\g<1>{bounds(version)}", at_least=required)
    replace(tree / INIT, r'^__version__ = ".*"$', f'__version__ = "{version}"', at_least=1)


def write_changelog(tree: Path, version: Version) -> None:
    """Move what changes/ says into CHANGELOG.md."""
    run(sys.executable, "-m", "towncrier", "build", "--yes", "--version", str(version), cwd=tree)


def build(tree: Path, dist: Path) -> list[Path]:
    """The wheel and the sdist of each package, checked."""
    for path in projects(tree):
        run(sys.executable, "-m", "build", "--no-isolation", "--outdir", dist, path.parent, cwd=tree)
    found = sorted(dist.iterdir())
    run(sys.executable, "-m", "twine", "check", "--strict", *found, cwd=tree)
    return found


def release(tree: Path, text: str) -> None:
    version = checked(tree, text)
    dist = tree / "dist" / text
    if dist.exists():
        raise RefusedError(f"{dist} exists: remove it")
    with tempfile.TemporaryDirectory() as folder:
        clone = Path(folder) / "tree"  # without what lies about in the tree: an old build/ would get into a wheel
        run("git", "clone", "--quiet", tree, clone, cwd=tree)
        set_versions(clone, version)
        write_changelog(clone, version)
        built = build(clone, Path(folder) / "dist")
        run("git", "add", "--update", cwd=clone)
        patch = Path(folder) / "patch"
        patch.write_text(run("git", "diff", "--cached", "--binary", cwd=clone), encoding="utf-8")
        run("git", "apply", "--index", patch, cwd=tree)
        shutil.copytree(Path(folder) / "dist", dist)
    print(f"release: {len(built)} files in {dist}; now run make test, commit what is staged, and tag it v{version}")


def main(arguments: list[str]) -> int:
    try:
        if len(arguments) != 1:
            raise RefusedError("give the version: make release VERSION=x.y.z")
        release(ROOT, arguments[0])
    except RefusedError as error:
        print(f"release: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
