"""`plait runs` beside Plait's own commands."""

import json


def write(folder, losses, ended):
    folder.mkdir(parents=True)
    rows = [{"step": n, "loss": loss} for n, loss in enumerate(losses, 1)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if ended:
        (folder / "outcome.json").write_text(json.dumps({"kind": ended, "reason": "", "step": len(rows)}))


def test_runs_in_the_order_of_their_losses(plait_project):
    write(plait_project.path / "runs" / "worse", [3.0, 2.5], "finished")
    write(plait_project.path / "runs" / "better", [3.0, 2.25, 2.0], None)
    (plait_project.path / "runs" / "else").mkdir()
    done = plait_project("runs")
    assert (done.code, done.err) == (0, "")
    lines = [line.split() for line in done.out.splitlines() if line.split()[1:2] not in ([], ["ended"])]
    assert lines[-2:] == [["better", "running", "3", "2.0000", "-"], ["worse", "finished", "2", "2.5000", "-"]]


def test_what_it_says_without_runs_and_of_a_wrong_folder(plait_project):
    (plait_project.path / "empty").mkdir()
    assert plait_project("runs", "empty").out == "no runs in empty\n"
    done = plait_project("runs", "nowhere")
    assert (done.code, done.err) == (1, "plait: nowhere is no folder; take one that holds runs, such as runs\n")
    assert "plait runs" in plait_project("runs", "--help").out
    assert "plait-runs" in plait_project("--help").out
