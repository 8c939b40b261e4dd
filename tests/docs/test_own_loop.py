"""A plain loop around `plait.apply` takes the same steps as `plait train`: the page's own commands say so."""

import json
from pathlib import Path

import pytest

from tests.docs.pages import ROOT, run, steps, write_files


@pytest.mark.slow
def test_the_page(tmp_path: Path) -> None:
    page = ROOT / "docs" / "own-loop.md"
    write_files(page, tmp_path)
    loop, train, compare = steps(page)
    assert (loop[0], train[:2], compare[:2]) == ("torchrun", ["plait", "train"], ["plait", "compare"])
    run(loop, tmp_path)
    run(train, tmp_path)
    mine, theirs = (
        [(row["step"], row["loss"], row["grad_norm"]) for row in map(json.loads, path.read_text().splitlines())]
        for path in (tmp_path / "loop.jsonl", *tmp_path.glob("runs/*/metrics.jsonl"))
    )
    assert [step for step, _, _ in mine] == list(range(1, 9))
    assert mine == theirs
    assert run(compare, tmp_path).splitlines()[-1] == "loss and grad_norm are bitwise equal"
