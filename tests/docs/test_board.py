"""The board shows every plugin of the repository, and what the suites of others' packages found."""

import json
import re
import tomllib
from pathlib import Path

import pytest

from plait.contract.kinds import KINDS
from tests.docs.pages import ROOT
from tools import board, third_parties


@pytest.fixture
def page(docs_path: None):
    import board as page

    return page


def test_every_plugin_of_the_repository_is_on_it() -> None:
    """If not: `make board`, or where its suite is as it was, `python -m tools.board build/board`."""
    text = (ROOT / "docs/board.md").read_text()
    groups = {kind.group for kind in KINDS.values()}
    for path in [ROOT / "core", *ROOT.glob("plugins/*"), *ROOT.glob("examples/*")]:
        if (path / "pyproject.toml").exists():
            project = tomllib.loads((path / "pyproject.toml").read_text())["project"]
            for group, entries in project.get("entry-points", {}).items():
                for name in entries if group in groups else ():
                    assert re.search(rf"`{name}` \| {project['name']} ", text), (name, project["name"])


def told(name: str, kind: str = "strategy", passed: int = 2, **more: object) -> dict:
    counts = {"passed": passed, "refused": 1, "skipped": 0, "failed": 0}
    graded = {"counts": counts, "beside": {"ddp": "refused", "fsdp2": "passed", "zero": "failed"}}
    row = {"name": name, "kind": kind, "distribution": f"plait-{name}", "version": "1.2", "api": 1, "state": "ok"}
    return row | {"grade": graded} | more


def test_the_page(page) -> None:
    other = told("a", source="git+https://x.org/a@v1") | {"grade": None}
    found = [
        {"torch": "2.9", "plugins": [told("a"), told("b", passed=9), told("m", "model")]},
        {"torch": "2.13.0", "plugins": [other, told("b"), told("s", "sink") | {"grade": None, "state": "broken: x"}]},
    ]
    text = page.board(found)
    assert "| `a` | plait-a 1.2 | 1 | not run | - | - | 2.9, 2.13.0 |" in text
    assert "| `b` | plait-b 1.2 | 1 | 2 passed, 1 refused | `fsdp2`, `zero` (fails) | `ddp` | 2.9, 2.13.0 |" in text
    assert "| model | `m` | plait-m 1.2 | 2 passed, 1 refused | 2.9 |" in text
    assert "| sink | `s` | plait-s 1.2 | 2.13.0 (fails) |" in text


def test_records_are_sorted_by_their_torch(page, tmp_path: Path) -> None:
    for version in ("2.9.1", "2.13.0", "2.11.0"):
        (tmp_path / f"{version}.json").write_text(json.dumps({"torch": version, "plugins": []}))
    assert [record["torch"] for record in page.records(tmp_path)] == ["2.9.1", "2.11.0", "2.13.0"]


def test_a_grade_is_that_of_its_plugin_or_the_last_one(tmp_path: Path) -> None:
    new = {"name": "a", "kind": "strategy", **told("a", passed=7)["grade"]}
    (tmp_path / "a.suite.json").write_text(json.dumps(new))
    plain = [{key: told(name)[key] for key in told(name) if key != "grade"} for name in ("b", "a", "c")]
    rows = board.joined(plain, tmp_path, {"plait-b": "git+x@1"}, [told("a"), told("b")])
    assert [row["grade"] and row["grade"]["counts"]["passed"] for row in rows] == [7, 2, None]
    assert [row.get("source") for row in rows] == [None, "git+x@1", None]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[a\n", "a package is [NAME] with source"),
        ("[a]\ntests = 't'\n", "source"),
        ("[a]\nsource = 'nowhere'\n", "nowhere is no folder; give a folder, or git+ADDRESS@TAG"),
        ("[a]\nsource = 'git+https://x.org/a'\n", "has no tag; give git+ADDRESS@TAG"),
    ],
)
def test_what_cannot_be_run_is_said(tmp_path: Path, capfd: pytest.CaptureFixture[str], text: str, said: str) -> None:
    (tmp_path / "third-parties.toml").write_text(text)
    assert third_parties.main([str(tmp_path / "third-parties.toml"), str(tmp_path / "grades")]) == 1
    out, err = capfd.readouterr()
    assert said in out + err


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_packages_of_others_are_tested_each_in_its_own_environment(plait_project, tmp_path: Path, capfd) -> None:
    names = ("sound", "broken")
    for name in names:
        assert plait_project("new", "--kind", "optimizer", name).code == 0
    (tmp_path / "plait-broken/tests/test_more.py").write_text("def test_it():\n    assert 1 == 2\n")
    listed = tmp_path / "list.toml"
    listed.write_text("".join(f"[plait-{name}]\nsource = '{tmp_path}/plait-{name}'\n" for name in names))
    grades = tmp_path / "grades"
    assert third_parties.main([str(listed), str(grades)]) == 1
    said = capfd.readouterr().out
    assert re.search(r"^plait-sound: passed$.*^plait-broken: .*assert 1 == 2", said, re.MULTILINE | re.DOTALL)
    assert "third-parties: 1 of 2 passed" in said
    plugins = json.loads((grades / "plait-sound.plugins.json").read_text())
    (row,) = board.joined(plugins, grades, {"plait-sound": "git+x@1"}, [])
    assert (row["name"], row["kind"], row["state"], row["source"]) == ("sound", "optimizer", "ok", "git+x@1")
    assert row["grade"]["counts"]["passed"] > 3
    assert row["grade"]["counts"]["failed"] == 0
