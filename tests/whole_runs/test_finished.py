"""What a run leaves; that it goes on after every mishap as if nothing had happened is what tests/faults finds out."""

import hashlib
import json

from tests.helpers.commands import SMALL, rows


def test_a_run_leaves_what_it_should(undisturbed):
    found = rows(undisturbed)
    assert [row["step"] for row in found] == list(range(1, 41))
    assert [row["step"] for row in found if "val_loss" in row] == [20, 40]
    assert found[-1]["tokens"] == 40 * 2 * 2 * 32
    assert found[0]["mfu"] is None
    assert found[-1]["loss"] < found[0]["loss"] - 1
    assert (undisturbed / "export" / "model.safetensors").exists()
    assert {p.name for p in (undisturbed / "checkpoints").iterdir()} == {"step-35", "step-40"}
    assert {p.name for p in (undisturbed / "ranks").iterdir()} == {"rank-0.log", "rank-1.log"}
    assert "plait-fsdp2" in (undisturbed / "versions.json").read_text()
    outcome = json.loads((undisturbed / "outcome.json").read_text())
    assert (outcome["kind"], "signal" in outcome) == ("finished", False)
    manifest = json.loads((undisturbed / "checkpoints" / "step-40" / "manifest.json").read_text())
    content = (undisturbed / "metrics.jsonl").read_bytes()
    assert manifest["data"]["metrics"] == [len(content), hashlib.sha256(content).hexdigest()]


def test_a_finished_run_says_so(plait_project, undisturbed, monkeypatch):
    monkeypatch.chdir(undisturbed.parent.parent)
    done = plait_project("train", *SMALL, "strategy=[fsdp2]", "run.name=a")
    assert (done.code, done.err) == (0, "")
    assert "a is finished at step 40: raise train.steps, or set another run.name" in done.out
