"""The pattern of a wrong gradient is read from the numbers of all ranks."""

import json
import math
from typing import Any

import pytest
import torch

from plait.testing import raises_about
from plait_testing.finding import worst_of
from plait_testing.foreign.asked import Answer
from plait_testing.foreign.causes import Cause, cause, of_losses
from plait_testing.foreign.command import _found
from plait_testing.foreign.report import First, Report, dumped
from tests.helpers.foreign import comparison

MESH = {"dp": 2, "tp": 2}
WHOLE = torch.randn(4, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
PARTS = [torch.randn(4, 6, generator=torch.Generator().manual_seed(i), dtype=torch.float64) for i in (1, 2)]


def half_zero(dim):
    found = WHOLE.clone()
    found.narrow(dim, found.shape[dim] // 2, found.shape[dim] // 2).zero_()
    return found


CASES: dict[str, tuple[Any, ...]] = {  # gradients of ranks (dp, tp) = (0, 0), (0, 1), (1, 0), (1, 1) -> kind, axis
    "no gradient": ([None] * 4, WHOLE, "dead", ""),
    "not a number": ([WHOLE * torch.nan] * 4, WHOLE, "not finite", ""),
    "another shape": ([WHOLE.T] * 4, WHOLE, "shape", ""),
    "only on ranks": ([WHOLE] * 4, WHOLE * 0, "alive", ""),
    "own part of tp": ([PARTS[0], PARTS[1]] * 2, PARTS[0] + PARTS[1], "not summed", "tp"),
    "own part of dp": ([PARTS[0]] * 2 + [PARTS[1]] * 2, PARTS[0] + PARTS[1], "not summed", "dp"),
    "own mean of dp": ([PARTS[0]] * 2 + [PARTS[1]] * 2, (PARTS[0] + PARTS[1]) / 2, "not summed", "dp"),
    "own multiple of tp": ([PARTS[0], PARTS[1]] * 2, (PARTS[0] + PARTS[1]) * 3, "not summed, scaled", "tp"),
    "one copy is wrong": ([WHOLE, WHOLE + PARTS[0]] * 2, WHOLE, "copies differ", "tp"),
    "a half": ([WHOLE / 2] * 4, WHOLE, "divided", "dp"),
    "a quarter": ([WHOLE / 4] * 4, WHOLE, "divided", "dp and tp"),
    "twice": ([WHOLE * 2] * 4, WHOLE, "multiplied", "dp"),
    "times 3": ([WHOLE * 3] * 4, WHOLE, "scaled", ""),
    "rows of one rank": ([half_zero(0)] * 4, WHOLE, "part", "dp"),
    "columns of one rank": ([half_zero(1)] * 4, WHOLE, "part", "dp"),
    "parts of other sizes": ([torch.cat([WHOLE[:2], WHOLE[2:] * 5])] * 4, WHOLE, "part", "dp"),
    "parts in another order": ([WHOLE[[1, 3, 0, 2]]] * 4, WHOLE, "permuted", ""),
    "anything": ([PARTS[0]] * 4, WHOLE, "other", ""),
}


@pytest.mark.parametrize("name", CASES)
def test_a_pattern(name):
    ranks, right, kind, axis = CASES[name]
    gradients = [{} if g is None else {"w": g} for g in ranks]
    found = cause(comparison(None, MESH), "w", gradients, {"w": right}, 1e-6)
    assert (found.kind, found.axis) == (kind, axis), found
    assert found.sentence


@pytest.mark.parametrize(("loss", "kind"), [(3.0 + math.log(2), "softmax counted"), (3.1, None)])
def test_a_wrong_loss_tells_of_the_softmax(loss, kind):
    found = of_losses(comparison(None, MESH), loss, 3.0)
    assert (found and found.kind) == kind


def report(fine):
    errors = {"a.weight": 0.0 if fine else 0.5, "b.weight": 0.0 if fine else float("inf")}
    first = (
        None if fine else First("gradients", "a.weight", 0.5, 1e-10, "whole", Cause("dead", "it is dead"), (2, 2), "b")
    )
    answers = [Answer("gradients", worst_of("", errors, 1e-10)), Answer("frozen", skipped="not now")]
    return Report(comparison(None, MESH), "Tiny", 7, answers, first)


@pytest.mark.parametrize("fine", [True, False])
def test_a_report_for_programs(fine):
    found = json.loads(dumped(report(fine).as_json()))
    assert (found["agrees"], report(fine).exit_code) == (fine, 0 if fine else 1)
    statuses = {each["question"]: each["status"] for each in found["answers"]}
    assert statuses == {"gradients": "ok" if fine else "wrong", "frozen": "skipped"}
    assert fine or (found["first"]["cause"]["kind"], found["answers"][0]["error"]) == ("dead", "inf")


def test_sarif_has_a_result_for_each_wrong_answer():
    run = json.loads(dumped(report(False).sarif("mine.py", 12)))["runs"][0]
    (result,) = run["results"]
    assert result["ruleId"] in {rule["id"] for rule in run["tool"]["driver"]["rules"]}
    assert "it is dead" in result["message"]["text"]
    place = result["locations"][0]["physicalLocation"]
    assert (place["artifactLocation"]["uri"], place["region"]["startLine"]) == ("mine.py", 12)
    assert {"name", "version"} <= run["tool"]["driver"].keys()  # what GitHub and the format's own validator ask for
    assert report(True).sarif()["runs"][0]["results"] == []


def test_a_function_that_is_not_there(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "named_wrong.py").write_text("def right():\n    pass\n")
    with raises_about("target", f"{tmp_path}/none.py::f"):
        _found(f"{tmp_path}/none.py::f")
    with raises_about("target", fits=["right"]):
        _found(f"{tmp_path}/named_wrong.py::wrong")
    with raises_about("target", "no_such_module:f"):
        _found("no_such_module:f")
