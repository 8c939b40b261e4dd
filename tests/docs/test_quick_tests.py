"""`make check` runs the tests of what is changed: those of a package alone, unless something else is changed too."""

import subprocess
from pathlib import Path

import pytest

from tests.docs.pages import ROOT
from tools.quick_tests import CORE, ONE_LAYOUT, changed, selected

REPORT = ("plugins/report/tests",)


@pytest.mark.parametrize(
    ("paths", "runs"),
    [
        ([], [CORE, ONE_LAYOUT]),
        (["plugins/report/src/plait_report/page.py"], [REPORT]),
        (["plugins/report/tests/test_report.py", "plugins/report/README.md", "docs/report.md"], [REPORT]),
        (["plugins/zero/a.py", "plugins/fsdp2/b.py"], [("plugins/fsdp2/tests", "plugins/zero/tests")]),
        (["core/plait/train/trainer.py"], [CORE, ONE_LAYOUT]),
        (["plugins/report/conf.py", "core/plait/host.pyi"], [REPORT, CORE, ONE_LAYOUT]),
        (["docs/plan.md", "docs/images/plan.svg"], []),
        (["docs/generate.py"], [CORE, ONE_LAYOUT]),
        (["plugins/removed/src/a.py"], [CORE, ONE_LAYOUT]),
    ],
)
def test_what_is_run(paths: list[str], runs: list[tuple[str, ...]]) -> None:
    assert selected(paths) == runs


def test_what_it_runs_is_there() -> None:
    assert [path for path in (*CORE, ONE_LAYOUT[0]) if not (ROOT / path).exists()] == []


def test_what_is_changed(tmp_path: Path) -> None:
    def git(*arguments: str) -> None:
        user = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false")
        subprocess.run(["git", *user, *arguments], cwd=tmp_path, check=True, capture_output=True)

    git("init", "--quiet", "--initial-branch=main")
    for name in ("kept.py", "edited.py", "staged.py", ".gitignore"):
        (tmp_path / name).write_text("ignored.py\n")
    git("add", "--all")
    git("commit", "--quiet", "--message", "all")
    assert changed(tmp_path) == []
    git("switch", "--quiet", "--create", "mine")
    (tmp_path / "staged.py").write_text("2\n")
    git("commit", "--quiet", "--all", "--message", "one more")
    for name in ("edited.py", "new.py", "ignored.py"):
        (tmp_path / name).write_text("2\n")
    assert sorted(changed(tmp_path)) == ["edited.py", "new.py", "staged.py"]
