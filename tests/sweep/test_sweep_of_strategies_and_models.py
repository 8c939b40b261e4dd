"""Strategies by models, a stranger's strategy among them: one does not fit, one breaks, the sweep is killed, goes on,
and is reported."""

import json
import signal
import time

import pytest

from plait_testing import whole_run
from tests.helpers.commands import SMALL, environment, kill_all, plait, ranks_of

MODEL = """
from plait_models.llama3 import Llama3


class Large(Llama3):
    def __init__(self, strategies, **options):
        super().__init__(**options)
        self.strategies = strategies

    def forward(self, tokens, positions=None):
        if "ddp" in self.strategies:
            raise ValueError("does not work under ddp")
        return super().forward(tokens, positions)
"""
CONF = "defaults: [llama3_debug]\n_target_: large.Large\nvocab_size: 60000\nstrategies: ${oc.dict.keys:strategy}\n"


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_four_finish_one_is_pruned_and_one_fails(tmp_path):
    pytest.importorskip("plotly")
    (tmp_path / "large.py").write_text(MODEL)
    (tmp_path / "conf/model").mkdir(parents=True)
    (tmp_path / "conf/model/large.yaml").write_text(CONF)
    # The large model's parameters, gradients and moments are 31 MB each, or half of it on each of two ranks.
    command = ["-m", "model=llama3_debug,large", "strategy=[],[fsdp2],[ddp]", "strategy.ddp.degree=2", *SMALL]
    command += ["model.dim=64", "train.steps=4", "train.seq_len=8", "train.local_batch_size=1", "validation.interval=4"]
    command += ["sweep.prune=true", "cluster=cpu", "cluster.reserved=0", "cluster.memory=1.2e8"]
    sweep = whole_run.start(command, tmp_path, environment())

    def jobs():
        (path,) = tmp_path.glob("runs/sweep-*/sweep.json")
        return json.loads(path.read_text())["jobs"]

    folder = None
    try:
        while len(list(tmp_path.glob("runs/sweep-*/2/ranks"))) == 0:
            assert sweep.poll() is None, sweep.communicate()[0]
            time.sleep(0.05)
        (folder,) = tmp_path.glob("runs/sweep-*")
        sweep.send_signal(signal.SIGKILL)
        sweep.wait(60)
    finally:
        kill_all(sweep, folder / "2" if folder else tmp_path)
    assert [job["state"] for job in jobs()] == ["finished", "finished", "running"]
    before = [(folder / name / "metrics.jsonl").stat().st_mtime_ns for name in "01"]
    done = plait("train", *command, cwd=tmp_path, timeout=900)
    assert done.code == 3, done.err
    assert [job["state"] for job in jobs()] == ["finished"] * 3 + ["pruned", "finished", "failed"], done.out
    assert [(folder / name / "metrics.jsonl").stat().st_mtime_ns for name in "01"] == before
    assert "sweep: 4 finished, 1 failed, 1 pruned" in done.out
    pruned, sharded, broken = jobs()[3:]
    assert pruned["reason"].startswith("does not fit cluster=")
    assert sharded["planned_memory_bytes"] < 1.2e8 < pruned["planned_memory_bytes"]
    assert "does not work under ddp" in broken["reason"]
    assert ranks_of(folder / "5") == []
    assert plait("report", "runs", cwd=tmp_path).code == 0
    page = (tmp_path / "report.html").read_text()
    assert "4 finished, 1 pruned, 1 failed" in page
    assert "does not work under ddp" in page
    assert "does not fit cluster=" in page
