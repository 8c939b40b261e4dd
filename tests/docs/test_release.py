"""What a release does to the tree, on a copy of it: versions, requirements, changelog; and what it refuses."""

import re
import shutil
import subprocess
import tomllib
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
