"""A campaign that is cut continues, and does not count what other code came to."""

from pathlib import Path

import pytest

from tests.faults import __main__ as campaign
from tests.faults import kept
from tests.faults.kept import Kept
from tests.faults.report import Result


def result(number, defect=""):
    planted = [] if defect else [("a rank: SIGKILL", "equal")]
    return Result(
        number, "signals", "one process", Path("x"), planted, ["a rank: SIGSTOP"] * bool(defect), defect, [], 1.0
    )


def test_results_are_read_again(tmp_path):
    first = Kept(tmp_path / "seed-0.jsonl")
    first.add(result(0))
    first.add(result(2, "a step was lost"))
    again = Kept(tmp_path / "seed-0.jsonl")
    assert again.results == first.results
    assert again.seconds == first.seconds
    assert again.numbers == {0, 2}
    assert again.results[1].faults == [("a rank: SIGSTOP", "defect")]
    assert again.results[0].commit == kept.commit()


def test_a_line_that_was_cut_is_dropped(tmp_path):
    path = tmp_path / "seed-0.jsonl"
    first = Kept(path)
    first.add(result(0))
    whole = path.read_text()
    path.write_text(whole + whole[:-9])
    again = Kept(path)
    again.add(result(1))
    assert Kept(path).numbers == {0, 1}


def test_results_of_other_code_do_not_count(tmp_path, monkeypatch):
    path = tmp_path / "seed-0.jsonl"
    first = Kept(path)
    first.add(result(0))
    first.add(result(1, "a step was lost"))
    written = path.read_text()
    monkeypatch.setattr(kept, "code", lambda: "other code")
    assert Kept(path).numbers == set()
    assert path.with_suffix(".old.jsonl").read_text() == written
    Kept(path).add(result(5))
    assert Kept(path).numbers == {5}


def test_code_is_what_decides_a_scenario(tmp_path, monkeypatch):
    for name in ("core", "docs"):
        (tmp_path / name).mkdir()
    (tmp_path / "core" / "a.py").write_text("a = 1")
    monkeypatch.setattr(kept, "ROOT", tmp_path)
    before = kept.code()
    (tmp_path / "docs" / "page.md").write_text("news")
    assert kept.code() == before
    (tmp_path / "core" / "a.py").write_text("a = 2")
    assert kept.code() != before


class Played:
    """A runner whose scenarios are over at once; the fourth of a call is cut by Ctrl-C."""

    def __init__(self, *args):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass

    def run(self, cases, more):
        for done, (number, _, _) in enumerate(cases):
            if not more():
                return
            if done == 3:
                raise KeyboardInterrupt
            yield result(number)


def test_the_next_call_continues_where_a_campaign_was_cut(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(campaign, "Runner", Played)
    page = tmp_path / "page.md"
    call = ["--count", "8", "--results", str(tmp_path), "--write", str(page)]
    for counted, last in ((3, 2), (6, 5), (8, 7)):
        assert campaign.main(call) == 0
        assert f"| **in all** | **{counted}** | **{counted}** |" in page.read_text()
        assert f"{counted:5}  #{last} " in capsys.readouterr().out
    assert campaign.main([*call, "--anew"]) == 0
    assert "| **in all** | **3** |" in page.read_text()


@pytest.mark.parametrize("extra", [["--only", "signals"], ["--seed", "7"]])
def test_each_seed_and_kind_has_a_file_of_its_own(tmp_path, monkeypatch, extra):
    monkeypatch.setattr(campaign, "Runner", Played)
    campaign.main(["--results", str(tmp_path)])
    campaign.main(["--results", str(tmp_path), *extra])
    assert len(list(tmp_path.glob("*.jsonl"))) == 2
