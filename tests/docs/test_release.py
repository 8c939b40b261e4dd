"""What a release does to the tree, on a copy of it: versions, requirements, changelog; and what it refuses."""

import contextlib
import email
import re
import shutil
import socket
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from tests.docs.pages import ROOT
from tools import release

NAMED = (
    "pyproject.toml",
    "core/pyproject.toml",
    "plugins/*/pyproject.toml",
    "examples/*/pyproject.toml",
    "CHANGELOG.md",
    "changes/*",
)
KINDS = [
    kind["directory"] for kind in tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["towncrier"]["type"]
]


def git(tree: Path, *arguments: str) -> None:
    user = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false")
    subprocess.run(["git", *user, *arguments], cwd=tree, check=True, capture_output=True)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """The files that a release changes, committed."""
    for path in [found for pattern in (*NAMED, *release.SHOWN, release.INIT) for found in ROOT.glob(pattern)]:
        place = tmp_path / path.relative_to(ROOT)
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, place)
    git(tmp_path, "init", "--quiet")
    git(tmp_path, "add", "--all")
    git(tmp_path, "commit", "--quiet", "--message", "all")
    return tmp_path


def project(path: Path) -> dict:
    return tomllib.loads(path.read_text(encoding="utf-8"))["project"]


def test_every_package_gets_the_version_and_requires_it_of_the_others(tree: Path) -> None:
    release.set_versions(tree, Version("3.5.1"))
    found = release.projects(tree)
    assert len(found) > 12
    bounded = 0
    for path in found:
        assert project(path)["version"] == "3.5.1"
        for text in project(path)["dependencies"]:
            if (required := Requirement(text)).name.startswith("plait"):
                assert "3.5.1" in required.specifier, path
                assert "3.4.9" not in required.specifier, path
                assert "3.6.0" not in required.specifier, path
                bounded += 1
    assert bounded >= len(found) - 1
    assert '__version__ = "3.5.1"\n' in (tree / release.INIT).read_text(encoding="utf-8")
    for page in release.SHOWN:
        assert "plait-core>=3.5,<3.6" in (tree / page).read_text(encoding="utf-8")


def test_no_other_file_names_the_bounds() -> None:
    """A release would leave them as they are."""
    listed = subprocess.run(["git", "grep", "-lE", "plait[a-z-]*>=[0-9.]+,<"], cwd=ROOT, capture_output=True, text=True)
    known = {
        *release.SHOWN,
        *(str(path.relative_to(ROOT)) for path in release.projects(ROOT)),
        "tests/docs/test_release.py",
    }
    assert set(listed.stdout.split()) - known == set()


def test_the_changelog_is_made_of_the_changes(tree: Path) -> None:
    shutil.rmtree(tree / "changes")
    (tree / "changes").mkdir()
    shutil.copy(ROOT / "changes" / "template.jinja", tree / "changes")
    changes = {
        "b.gpus.md": "- three\n",
        "a.gpus.md": "- one\n- two that\n  is long\n",
        "x-2.commands.md": "- `{% x %}`\n",
    }
    for name, text in changes.items():
        (tree / "changes" / name).write_text(text, encoding="utf-8")
    git(tree, "add", "--all")
    release.write_changelog(tree, Version("3.5.1"))
    text = (tree / "CHANGELOG.md").read_text(encoding="utf-8")
    above, _, below = text.partition("<!-- releases, the newest first -->\n")
    assert "\n- " not in above
    said = re.sub(r"\(\d{4}-\d\d-\d\d\)", "(DATE)", below)
    assert said.startswith(
        "\n## 3.5.1 (DATE)\n\n### Commands\n\n- `{% x %}`\n\n### GPUs\n\n- one\n- two that\n  is long\n- three\n\n## "
    )
    assert [path.name for path in (tree / "changes").iterdir()] == ["template.jinja"]
    release.set_versions(tree, Version("3.5.1"))
    with pytest.raises(release.RefusedError, match=r"VERSION=3\.5\.1 is not newer than 3\.5\.1, which is released"):
        release.checked(tree, "3.5.1")


def test_what_is_no_version_is_refused(tree: Path) -> None:
    for text in ("", "0.2", "v0.2.0", "0.2.0rc1", "00.2.0", "newest"):
        with pytest.raises(release.RefusedError, match="is no version; give three numbers"):
            release.checked(tree, text)


def test_an_older_version_is_refused_and_a_newer_one_taken(tree: Path) -> None:
    release.set_versions(tree, Version("0.10.0"))
    git(tree, "commit", "--all", "--quiet", "--message", "version")
    assert release.checked(tree, "0.10.0") == Version("0.10.0"), "it is not released yet"
    assert release.checked(tree, "0.10.1") == Version("0.10.1")
    with pytest.raises(release.RefusedError, match=r"VERSION=0\.9\.9 is not newer than 0\.10\.0$"):
        release.checked(tree, "0.9.9")


def test_a_tree_with_changes_is_refused(tree: Path) -> None:
    (tree / "new.py").touch()
    with pytest.raises(release.RefusedError, match=r"the tree has changes \(\?\? new\.py, 1 in all\)"):
        release.checked(tree, "9.0.0")


def test_a_release_that_fails_leaves_the_tree_as_it_was(tree: Path) -> None:
    git(tree, "rm", "changes/template.jinja")
    git(tree, "commit", "--quiet", "--message", "no template")
    with pytest.raises(release.RefusedError, match=r"towncrier build \.\.\.` failed: .*template"):
        release.release(tree, "9.0.0")
    assert subprocess.run(["git", "status", "--porcelain"], cwd=tree, capture_output=True, check=True).stdout == b""


ROOT_PROJECT = project(ROOT / "pyproject.toml")


def test_every_package_has_the_metadata_that_an_index_shows() -> None:
    for path in release.projects(ROOT):
        for key in ("classifiers", "urls", "license", "license-files", "requires-python", "readme"):
            assert project(path)[key] == ROOT_PROJECT[key], (path, key)
        assert project(path)["description"], path
        assert path.with_name("README.md").is_file(), path
        assert path.with_name("LICENSE").resolve() == ROOT / "LICENSE", path


PAGE = """\
[a](../../docs/a.md#b), [here](#c), [web](https://x.org/y), ![p](images/p.png "t"),
`[code](no.md)` [![p](p.png)](deep/README.md)
```text
[fenced](no.md)
```
[last
line](../x.py)
"""
LED = """\
[a](S/blob/v1.2.3/docs/a.md#b), [here](#c), [web](https://x.org/y), ![p](S/raw/v1.2.3/plugins/z/images/p.png "t"),
`[code](no.md)` [![p](S/raw/v1.2.3/plugins/z/p.png)](S/blob/v1.2.3/plugins/z/deep/README.md)
```text
[fenced](no.md)
```
[last
line](S/blob/v1.2.3/plugins/x.py)
"""


def test_links_of_a_page_lead_to_the_files_of_its_version() -> None:
    assert release.absolute(PAGE, "plugins/z", "S", Version("1.2.3")) == LED


def test_a_long_description_has_no_relative_link(tree: Path) -> None:
    """Those of the README of each package lead to files that are there."""
    pages = [path.with_name("README.md") for path in release.projects(tree)]
    for page in pages:
        shutil.copy(ROOT / page.relative_to(tree), page)
    release.make_links_absolute(tree, Version("1.2.3"))
    source = ROOT_PROJECT["urls"]["Source"]
    led = 0
    for page in pages:
        text = release.CODE.sub("", page.read_text(encoding="utf-8"))
        for target in re.findall(r"\]\(([^)\s]+)", text) + re.findall(r"(?:src|href)=\"([^\"]*)", text):
            assert target.startswith(("#", "https://")), (page, target)
            if match := re.fullmatch(rf"{source}/(?:blob|raw)/v1\.2\.3/([^#]+)(?:#.*)?", target):
                assert (ROOT / match[1]).exists(), (page, target)
                led += 1
    assert led > 100


@pytest.fixture
def index(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """The address of a local index, and where it keeps what is uploaded."""
    folder = tmp_path_factory.mktemp("index")
    command = [sys.executable, "-m", "pypiserver", "run", "-p", "0", "-i", "127.0.0.1", "-P", ".", "-a", "."]
    with socket.create_server(("127.0.0.1", 0)) as free:
        command[command.index("-p") + 1] = port = str(free.getsockname()[1])
    server = subprocess.Popen([*command, folder], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        while server.poll() is None:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", int(port))):
                break
        yield f"http://127.0.0.1:{port}", folder
    finally:
        server.kill()
        server.wait()


@pytest.mark.slow
def test_a_release_is_uploaded_and_installs_from_its_index(
    tree: Path, index: tuple[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The core and one strategy, by the command's own functions, to an index that is running here."""
    url, kept = index
    monkeypatch.setenv("TWINE_USERNAME", "a")
    monkeypatch.setenv("TWINE_PASSWORD", "b")
    ours = ("core", "plugins/fsdp2")
    git(tree, "rm", "-r", "--quiet", "plugins", "examples", "core", "pyproject.toml")
    for name in ours:
        shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("*.egg-info", "build", "__pycache__"))
    shutil.copy(ROOT / "LICENSE", tree)
    whole = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    (tree / "pyproject.toml").write_text(re.sub(r"^dependencies = .*$", "dependencies = []", whole, flags=re.MULTILINE))
    monkeypatch.setattr(release, "PACKAGES", tuple(f"{name}/pyproject.toml" for name in ours))
    git(tree, "add", "--all", "--force")
    git(tree, "commit", "--quiet", "--message", "two packages")
    release.release(tree, "9.8.7", url)
    dist = tree / "dist/9.8.7"
    assert {file.name for file in kept.iterdir()} == {file.name for file in dist.iterdir()}
    assert len(list(kept.iterdir())) == 4
    noted = dist.with_name("9.8.7.uploaded")
    *others, last = noted.read_text().splitlines()
    assert last == f"{url} plait_fsdp2-9.8.7.tar.gz"
    noted.write_text("\n".join([*others, ""]))  # as if the upload had broken off before it
    (kept / "plait_fsdp2-9.8.7.tar.gz").unlink()
    release.release(tree, "9.8.7", url)
    assert (kept / "plait_fsdp2-9.8.7.tar.gz").is_file()
    assert noted.read_text().splitlines()[-1] == last
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet", "--no-deps"]
    got = tree / "got"
    subprocess.run([*pip, "--index-url", f"{url}/simple/", "--dest", got, "plait-core", "plait-fsdp2"], check=True)
    for wheel in got.glob("*.whl"):
        with zipfile.ZipFile(wheel) as inside:
            (name,) = (name for name in inside.namelist() if name.endswith(".dist-info/METADATA"))
            metadata = email.message_from_bytes(inside.read(name))
            assert any(each.endswith("licenses/LICENSE") for each in inside.namelist())
            assert any(each.endswith("/py.typed") for each in inside.namelist())
        assert metadata["Version"] == "9.8.7"
        assert len(metadata.get_all("Project-URL")) == len(ROOT_PROJECT["urls"])
        assert metadata.get_all("Classifier") == ROOT_PROJECT["classifiers"]
        assert re.search(r"/blob/v9\.8\.7/docs/\w+\.md", metadata.get_payload())
    assert len(list(got.glob("*.whl"))) == 2


def test_a_change_is_named_and_written_as_the_changelog_needs_it() -> None:
    """See changes/README.md."""
    for path in {*(ROOT / "changes").iterdir()} - {ROOT / "changes" / "README.md", ROOT / "changes" / "template.jinja"}:
        assert re.fullmatch(rf"[a-z0-9]+(-[a-z0-9]+)*\.({'|'.join(KINDS)})\.md", path.name), path
        lines = path.read_text(encoding="utf-8").splitlines()
        assert lines[0].startswith("- "), path
        assert [line for line in lines if not line.startswith(("- ", "  "))] == [], path


def test_the_page_on_changes_names_every_kind() -> None:
    readme = (ROOT / "changes" / "README.md").read_text(encoding="utf-8")
    assert [kind for kind in KINDS if f"`{kind}`" not in readme] == []
