"""`plait compare`: where two runs part."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from plait import PlaitError
from plait.commands.main import run as command
from plait_report.compared import compare


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def run(losses: list[float | None], first: int = 1, **more: Any) -> list[dict[str, Any]]:
    return [{"step": i, "loss": loss, "grad_norm": 1.0, **more} for i, loss in enumerate(losses, first)]


@pytest.fixture
def a(tmp_path: Path) -> Path:
    return write(tmp_path / "a" / "metrics.jsonl", run([4.0, 3.0, 2.0, 1.0]))


def test_equal_runs(a: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    b = write(tmp_path / "b" / "metrics.jsonl", run([4.0, 3.0, 2.0, 1.0], tokens_per_second=9.0))
    found = compare(a, b.parent)  # a file and a folder
    assert found.agree()
    assert found.common == 4
    assert found.differences["loss"].first is None
    assert found.differences["loss"].last == (4, 1.0, 1.0)
    assert found.only == ((), ("tokens_per_second",))
    assert compare(b, a).only == (("tokens_per_second",), ())
    assert command("compare", [str(a), str(b)]) == 0
    printed = capsys.readouterr().out
    assert "bitwise equal" in printed
    assert "only in B: tokens_per_second" in printed


def test_one_bit_is_a_difference(a: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    b = write(tmp_path / "b.jsonl", run([4.0, 3.0, math.nextafter(2.0, 3.0), 1.0]))
    loss = compare(a, b).differences["loss"]
    assert loss.first == 3
    assert loss.absolute == (math.ulp(2.0), 3)
    assert command("compare", [str(a), str(b)]) == 1
    assert "they first differ at step 3" in capsys.readouterr().out
    assert command("compare", [str(a), str(b), "--tolerance", "1e-12"]) == 0
    assert "within the tolerance" in capsys.readouterr().out
    assert command("compare", [str(a), str(b), "--tolerance", "1e-17"]) == 1
    assert "by more than the tolerance" in capsys.readouterr().out


def test_the_sign_of_zero_is_a_difference(tmp_path: Path) -> None:
    x, y = write(tmp_path / "x.jsonl", run([0.0])), write(tmp_path / "y.jsonl", run([-0.0]))
    assert compare(x, y).differences["loss"].first == 1


def test_the_largest_differences_and_their_steps(a: Path, tmp_path: Path) -> None:
    b = write(tmp_path / "b.jsonl", run([4.0, 3.5, 2.0, 1.25]))
    loss = compare(a, b).differences["loss"]
    assert loss.first == 2
    assert loss.absolute == (0.5, 2)
    assert loss.relative == (0.2, 4)


def test_only_common_steps_count(a: Path, tmp_path: Path) -> None:
    b = write(tmp_path / "b.jsonl", run([2.0, 1.0, 0.5], first=3))
    found = compare(a, b)
    assert found.common == 2
    assert found.steps == ((1, 4, 4), (3, 5, 3))
    assert found.agree()
    assert found.differences["loss"].last == (4, 1.0, 1.0)


def test_validation_is_compared_where_both_have_it_and_does_not_decide(a: Path, tmp_path: Path) -> None:
    rows = [run([4.0, 3.0, 2.0, 1.0]) for _ in range(2)]
    rows[0][1]["val_loss"], rows[0][3]["val_loss"], rows[1][3]["val_loss"] = 9.0, 5.0, 4.0
    x, y = (write(tmp_path / f"{i}.jsonl", r) for i, r in enumerate(rows))
    val = compare(x, y).differences["val_loss"]
    assert (val.steps, val.first, val.absolute) == (1, 4, (1.0, 4))
    assert command("compare", [str(x), str(y)]) == 0


def test_norms_decide_too(a: Path, tmp_path: Path) -> None:
    rows = run([4.0, 3.0, 2.0, 1.0])
    rows[2]["grad_norm"] = 1.5
    found = compare(a, write(tmp_path / "b.jsonl", rows))
    assert found.differences["loss"].first is None
    assert not found.agree()


def test_null_equals_null_and_nothing_else(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    x = write(tmp_path / "x.jsonl", run([2.0, None, None]))
    y = write(tmp_path / "y.jsonl", run([2.0, None, 1.0]))
    loss = compare(x, y).differences["loss"]
    assert (loss.first, loss.absolute) == (3, (math.inf, 3))
    assert command("compare", [str(x), str(y), "--tolerance", "1e9"]) == 1
    assert "null" in capsys.readouterr().out


def test_a_run_still_being_written(a: Path, tmp_path: Path) -> None:
    b = tmp_path / "b.jsonl"
    b.write_bytes(a.read_bytes()[:-12])
    assert compare(a, b).common == 3


def test_runs_are_found_by_their_names(plait_project: Any) -> None:
    for name, losses in (("few", [3.0, 2.0]), ("tuned", [3.0, 1.0])):
        folder = plait_project.path / "runs" / name
        folder.mkdir(parents=True)
        write(folder / "metrics.jsonl", run(losses))
    done = plait_project("compare", "few", "tuned")
    assert (done.code, "they first differ at step 2" in done.out) == (1, True)
    refused = plait_project("compare", "few", "tned")
    assert refused.err.endswith("; in runs there are few, tuned; did you mean 'tuned'?\n")


@pytest.mark.parametrize(
    ("what", "sentence"),
    [
        ("missing", "missing is not there; it must be a run or its name, or a metrics.jsonl"),
        ("folder", "the folder .*folder holds no metrics.jsonl"),
        ("empty.jsonl", "empty.jsonl has no rows yet"),
        ("later.jsonl", "no step in common: .* has 1 to 4 and .* has 9 to 9"),
    ],
)
def test_what_cannot_be_compared(plait_project: Any, what: str, sentence: str, a: Path, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    write(tmp_path / "empty.jsonl", [])
    write(tmp_path / "later.jsonl", run([1.0], first=9))
    with pytest.raises(PlaitError, match=sentence):
        compare(a, tmp_path / what)
    refused = plait_project("compare", str(a), str(tmp_path / what))
    assert (refused.code, refused.out) == (2, "")
