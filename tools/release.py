"""Makes a release: `make release VERSION=x.y.z`, with INDEX=URL also uploads it.

It sets the version of every package and what they require of each other, writes CHANGELOG.md from changes/, makes the
links of each README absolute, builds a wheel and an sdist of each package into dist/VERSION, and checks them. All this
happens in a clone; the tree changes only if it worked. Nothing is committed.

With INDEX, such as https://upload.pypi.org/legacy/, the files are then uploaded: the core first and `plait` last, so
that nobody installs a package before what it requires is there. Name and password are those of twine (TWINE_USERNAME,
TWINE_PASSWORD, or ~/.pypirc). If the version is in dist/ already, it is only uploaded, without the files that were
uploaded there before: so the same command continues a broken upload.
"""

import os.path
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
CODE = re.compile(r"^ *(```|~~~).*?^ *\1`*$|`[^`\n]+`", re.MULTILINE | re.DOTALL)  # where a link is none
LINK = re.compile(r"(?<=\]\()[^)\s]+")  # its target
PICTURES = (".gif", ".jpg", ".png", ".svg")


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


def absolute(text: str, folder: str, source: str, version: Version) -> str:
    """A page of the folder (relative to the root) as an index shows it: links and pictures lead to the files of this
    version in the repository at `source`."""

    def led(link: re.Match[str]) -> str:
        target = link[0]
        if target.startswith(("#", "mailto:")) or "://" in target:
            return target
        kind = "raw" if target.endswith(PICTURES) else "blob"
        return f"{source}/{kind}/v{version}/{os.path.normpath(os.path.join(folder, target))}"

    pieces, end = [], 0
    for code in CODE.finditer(text):
        pieces += [LINK.sub(led, text[end : code.start()]), code[0]]
        end = code.end()
    return "".join([*pieces, LINK.sub(led, text[end:])])


def make_links_absolute(tree: Path, version: Version) -> None:
    for path in projects(tree):
        source = tomllib.loads(path.read_text(encoding="utf-8"))["project"]["urls"]["Source"]
        page = path.with_name("README.md")
        folder = page.parent.relative_to(tree).as_posix()
        page.write_text(absolute(page.read_text(encoding="utf-8"), folder, source, version), encoding="utf-8")


def build(tree: Path, dist: Path) -> list[Path]:
    """The wheel and the sdist of each package, checked."""
    for path in projects(tree):
        run(sys.executable, "-m", "build", "--no-isolation", "--outdir", dist, path.parent, cwd=tree)
    found = sorted(dist.iterdir())
    run(sys.executable, "-m", "twine", "check", "--strict", *found, cwd=tree)
    return found


def upload(dist: Path, index: str) -> None:
    """Upload file by file, and note beside the folder what the index has, so that the next call goes on there."""
    noted = dist.with_name(f"{dist.name}.uploaded")
    done = set(noted.read_text(encoding="utf-8").splitlines()) if noted.exists() else set()
    last, first = "plait-", "plait_core-"
    files = sorted(dist.iterdir(), key=lambda f: (f.name.startswith(last), not f.name.startswith(first), f.name))
    for number, file in enumerate(files, start=1):
        if (line := f"{index} {file.name}") in done:
            continue
        print(f"release: uploading {number} of {len(files)}, {file.name}", flush=True)
        options = ("--non-interactive", "--disable-progress-bar", "--repository-url", index)
        run(sys.executable, "-m", "twine", "upload", *options, file, cwd=dist)
        with noted.open("a", encoding="utf-8") as notes:
            notes.write(f"{line}\n")
    print(f"release: {index} has the {len(files)} files of {dist}")


def release(tree: Path, text: str, index: str = "") -> None:
    """index: the address that twine uploads to; "": none. Raises RefusedError."""
    dist = tree / "dist" / text
    if not (index and dist.exists()):
        make(tree, text, dist)
    if index:
        upload(dist, index)


def make(tree: Path, text: str, dist: Path) -> None:
    version = checked(tree, text)
    if dist.exists():
        raise RefusedError(f"{dist} exists: remove it, or give INDEX=URL to upload it")
    with tempfile.TemporaryDirectory() as folder:
        clone = Path(folder) / "tree"  # without what lies about in the tree: an old build/ would get into a wheel
        run("git", "clone", "--quiet", tree, clone, cwd=tree)
        set_versions(clone, version)
        write_changelog(clone, version)
        run("git", "add", "--update", cwd=clone)
        patch = Path(folder) / "patch"
        patch.write_text(run("git", "diff", "--cached", "--binary", cwd=clone), encoding="utf-8")
        make_links_absolute(clone, version)  # after the patch: in the repository they lead to its own files
        built = build(clone, Path(folder) / "dist")
        run("git", "apply", "--index", patch, cwd=tree)
        shutil.copytree(Path(folder) / "dist", dist)
    print(f"release: {len(built)} files in {dist}; commit what is staged and tag it v{version}: their links lead there")


def main(arguments: list[str]) -> int:
    try:
        if len(arguments) not in (1, 2):
            raise RefusedError("give the version: make release VERSION=x.y.z, and INDEX=URL to upload it")
        release(ROOT, *arguments)
    except RefusedError as error:
        print(f"release: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
