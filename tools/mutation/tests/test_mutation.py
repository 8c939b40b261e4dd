"""Mutation testing is itself tested: what is drawn, which tests are chosen, and that a planted bug is found."""

import ast
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from plait.contract import names
from plait_mutation import forked, page, record, recorded
from plait_mutation.draw import ROOT, Mutant, chosen, drawn, mutants
from plait_mutation.judge import Copy, Verdict
from plait_mutation.recorded import Recorded, read
from plait_mutation.repeats import LIST, repeats, write
from plait_testing.pool import PRELOADED

SOURCE = '''
"""Ä text with 1 == 1."""
from x import y
LIMIT = 8
def f(a, b, *, keep=True) -> "a[0]":
    assert a == b
    if keep and not a.done:
        send(a, b, group=a.group)
    log.info("%d", 3)
    return f"{a + 1}" if min(a, b) < LIMIT else axis("dp_shard", a - b)
'''


@pytest.fixture
def found(tmp_path):
    (tmp_path / "f.py").write_text(SOURCE)
    return list(mutants(tmp_path, "f.py"))


def test_what_is_changed(found):
    assert {(m.operator, " ".join(m.before.split()), m.after) for m in found} == {
        ("off by one", "8", "9"),
        ("and, or", "keep and not a.done", "(keep or not a.done)"),
        ("condition", "not a.done", "(a.done)"),
        ("dropped call", "send(a, b, group=a.group)", "pass"),
        ("swapped arguments", "send(a, b, group=a.group)", "send(b, a, group=a.group)"),
        ("ignored option", "send(a, b, group=a.group)", "send(a, b)"),
        ("comparison", "min(a, b) < LIMIT", "(min(a, b) <= LIMIT)"),
        ("wrong function", "min(a, b)", "max(a, b)"),
        ("swapped arguments", 'axis("dp_shard", a - b)', "axis(a - b, 'dp_shard')"),
        ("swapped arguments", 'log.info("%d", 3)', "log.info(3, '%d')"),
        ("wrong group", '"dp_shard"', "'dp_replicate'"),
        ("arithmetic", "a - b", "(a + b)"),
        ("off by one", "3", "4"),
    }


def test_what_only_importing_runs_is_known(found):
    assert {m.before for m in found if m.imported} == {"8"}


def test_each_is_one_change_of_the_text(found):
    for mutant in found:
        text = mutant.applied(SOURCE)
        ast.parse(text)
        assert text[: mutant.start] == SOURCE[: mutant.start]
        assert text.endswith(SOURCE[mutant.end :])
        assert text != SOURCE


def test_lines_are_those_of_the_statement(found):
    lines = {m.before: m.lines for m in found}
    assert lines["keep and not a.done"] == (7, 7)  # the head, not what is inside
    assert lines["8"] == (4, 4)


@pytest.mark.slow
def test_every_mutant_has_a_name_of_its_own():
    found = drawn(1)
    assert len(found) == len({m.name for m in found})
    assert len({m.operator for m in chosen(found, 10)}) == 10


def test_a_seed_draws_the_same_and_another_seed_others(tmp_path):
    shutil.copytree(ROOT / "core" / "plait" / "parallel", tmp_path / "core" / "plait" / "parallel")
    names, again, other = ([m.name for m in drawn(seed, tmp_path)] for seed in (1, 1, 2))
    assert names == again
    assert names[:40] != other[:40]


def test_what_is_added_moves_no_other_mutant(tmp_path):
    (tmp_path / "core" / "plait").mkdir(parents=True)
    (tmp_path / "core" / "plait" / "f.py").write_text(SOURCE)
    before = [m.name for m in drawn(0, tmp_path) if m.operator == "swapped arguments"]
    (tmp_path / "core" / "plait" / "g.py").write_text(SOURCE)
    after = [m.name for m in drawn(0, tmp_path) if m.operator == "swapped arguments"]
    assert [name for name in after if name in before] == before
    assert len(after) == 2 * len(before) > 2


def test_ranks_of_forks_import_what_ranks_of_tests_do():
    assert [*forked.RANKS] == [*PRELOADED]


def mutant_of(file, line, **more):
    return Mutant(file, 0, 1, (line, line), "comparison", "a", "b", **more)


def test_the_tests_of_the_room_come_first_and_others_that_run_the_line_follow():
    loss = "core/plait/parallel/loss.py"
    near, far, slow, other, shared, beside = (
        Recorded("tests/parallel/test_loss.py::a", 5.0, {loss: frozenset({7})}),
        Recorded("tests/launch/test_x.py::b", 0.1, {loss: frozenset({7, 8})}),
        Recorded("tests/launch/test_x.py::c", 400.0, {loss: frozenset({7})}),
        Recorded("tests/parallel/test_loss.py::d", 0.1, {loss: frozenset({9})}),
        Recorded("tests/data/test_y.py::e", 0.1, {}),
        Recorded("tests/parallel/test_z.py::f", 0.05, {}),
    )
    assert recorded.tests_for(mutant_of(loss, 7), [far, near, slow, other, shared]) == [other, near, far]
    assert recorded.tests_for(mutant_of(loss, 99), [far, beside, near]) == [near, beside], "nobody is known to run it"
    assert recorded.tests_for(mutant_of(loss, 99, imported=True), [near, far]) == [near]
    assert recorded.tests_for(mutant_of(loss, 7, imported=True), [near, far, other, beside]) == [
        *(other, near, beside, far)
    ]


def test_recorded_lines_of_a_test_and_of_what_it_started(tmp_path):
    now, lines = recorded.state_of("tests/a.py::t"), {"core/plait/a.py": [1]}
    rows = [
        ("tests/a.py::t", "passed", 1.0, {"core/plait/a.py": [7]}, "before the file was changed"),
        ("tests/a.py::t", "passed", 1.0, lines, now),
        ("tests/a.py::u", "failed", 1.0, {}, now),
    ]
    (tmp_path / "tests-1.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "2.json").write_text(json.dumps(["tests/a.py::t", {str(ROOT / "core/plait/a.py"): [2]}]))
    assert read(tmp_path) == [Recorded("tests/a.py::t", 1.0, {"core/plait/a.py": frozenset({1, 2})})]


FORKS = """
import os
from plait.contract.names import check_name
if (pid := os.fork()) == 0:
    os.environ["PLAIT_TEST"] = "tests/a.py::u"
    check_name("a", "run.name")
    os._exit(0)
os.waitpid(pid, 0)
"""


def test_a_fork_that_leaves_by_os_exit_is_recorded_for_the_test_of_its_own_time(tmp_path):
    inject = Path(record.__file__).with_name("inject")
    env = {"PLAIT_LINES": str(tmp_path), "PLAIT_TEST": "tests/a.py::t", "PYTHONPATH": str(inject)}
    env["PLAIT_SOURCES"] = os.pathsep.join(record.SOURCES)
    subprocess.run([sys.executable, "-c", FORKS], env={**os.environ, **env}, check=True)
    found = dict(json.loads(file.read_text()) for file in tmp_path.glob("*.json"))
    own, forked = (set(found[f"tests/a.py::{test}"][names.__file__]) for test in "tu")
    assert own < forked


def test_of_what_fails_on_a_rank_the_lines_are_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(record, "FOLDER", tmp_path)
    monkeypatch.setenv("PLAIT_TEST", "tests/a.py::t")
    function = record.Measured(lambda: names.check_name("a/b", "run.name"))
    with pytest.raises(ValueError):
        function()
    assert "PLAIT_TEST" not in os.environ, "the process itself is of no test"
    ((test, lines),) = (json.loads(file.read_text()) for file in tmp_path.glob("*.json"))
    assert (test, [*lines]) == ("tests/a.py::t", ["core/plait/contract/names.py"])


TESTS = """
from plait.contract.batch import IGNORE
def test_blind(): pass
def test_broken(): assert IGNORE != -100
def test_sees(): assert IGNORE == -100
"""


@pytest.mark.slow
def test_a_planted_bug_is_found_and_what_is_broken_anyway_does_not_count(tmp_path):
    copy = Copy(tmp_path)
    (tmp_path / "tests" / "test_ignore.py").write_text(TESTS)
    blind, broken, sees = (
        Recorded(f"tests/test_ignore.py::test_{name}", 0.1, {}) for name in ("blind", "broken", "sees")
    )
    file = "core/plait/contract/batch.py"
    text = (ROOT / file).read_text()
    start = text.index("100")
    mutant = Mutant(file, start, start + 3, (1, 1), "off by one", "100", "101")
    assert copy.judge(mutant, [blind, sees]).caught == sees.name
    assert copy.judge(mutant, [blind]).caught is None
    nothing = Mutant(file, start, start + 3, (1, 1), "off by one", "100", "100")
    assert copy.judge(nothing, [broken, sees]).caught is None
    assert (tmp_path / file).read_text() == text


def test_the_page(tmp_path, monkeypatch):
    one, two, three = (mutant_of("core/plait/parallel/loss.py", 1) for _ in range(3))
    monkeypatch.setattr(page, "reasons", lambda: {one.name: "equivalent: nothing divides by it"})
    (tmp_path / "page.md").write_text(f"before\n{page.MARK}\nold\n")
    page.write(tmp_path / "page.md", [(one, Verdict("t", 1, 1.0)), (two, Verdict(None, 2, 1.0))], 3, "abc")
    text = (tmp_path / "page.md").read_text()
    assert text.startswith("before\n")
    assert "old" not in text
    assert "| **in all** | 2 | 1 | 1 | 0 |" in text
    assert "seed 3, commit abc" in text
    assert page.summary([(three, Verdict(None, 1, 1.0))]).endswith("100.0% caught or equivalent")


def test_a_case_repeats_others_if_each_of_its_lines_is_run_twice_more():
    def case(name, seconds, *lines):
        return Recorded(f"t.py::{name}", seconds, {"f.py": frozenset(lines)})

    others = [case("test_b", 1, 1, 2), case("test_c", 1, 1, 2, 3)]
    assert repeats([case("test_a[x]", 9, 1, 2), case("test_a[y]", 8, 1), *others], set()) == ["t.py::test_a[x]"]
    assert repeats([case("test_a", 9, 1, 2), *others], set()) == []  # there is no other case
    assert repeats([case("test_a[x]", 9, 1, 3), case("test_a[y]", 8, 1), *others], set()) == ["t.py::test_a[y]"]
    assert repeats([case("test_a[x]", 0.1, 1), case("test_a[y]", 0.1, 1), *others], set()) == []
    caught = {"t.py::test_a[x]"}
    assert repeats([case("test_a[x]", 9, 1, 2), case("test_a[y]", 0.1, 1), *others], caught) == []


def test_the_list_of_repeats_only_grows(tmp_path):
    for found in (["b", "a"], ["c", "a"]):
        write(tmp_path / "repeats.txt", found)
    assert (tmp_path / "repeats.txt").read_text() == "a\nb\nc\n"


@pytest.mark.slow
def test_each_of_the_list_is_a_case_of_a_test():
    collect = [sys.executable, "-m", "pytest", "--collect-only", "-m", "slow"]
    done = subprocess.run(collect, cwd=ROOT, capture_output=True, text=True, check=True)
    assert {*LIST.read_text(encoding="utf-8").splitlines()} <= {*done.stdout.splitlines()}
