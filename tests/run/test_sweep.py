"""A sweep with `-m`: every job is a run of its own, and one that fails is named and stops no other."""

import re
from pathlib import Path

import pytest
from commands import plait as command
from commands import rows
from inside import plait

from plait.contract.errors import PlaitError
from plait.records.run_folder import Outcome

SWEEP = ("train", "-m", "train.seed=1,2", "strategy=[fsdp2],[]", "hydra.sweep.dir=runs/sweep")
NAMED = r"plait: job 2 of the sweep \(train\.seed=2, strategy=\[fsdp2\]\) failed: "

MODEL = """
import torch.distributed as dist
from plait.models.llama3 import Llama3


class Mine(Llama3):
    def __init__(self, seed, **options):
        super().__init__(**options)
        self.seed = seed

    def forward(self, tokens, positions=None):
        if self.seed == 2 and dist.get_world_size() == 2:
            raise ValueError("made to fail,\\nin two lines")
        return super().forward(tokens, positions)
"""


@pytest.fixture(autouse=True)
def _folder(tmp_path, monkeypatch):
    """A user's folder, with a model whose third job breaks."""
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(MODEL)
    Path("conf/model").mkdir(parents=True)
    Path("conf/model/mine.yaml").write_text("defaults: [llama3_debug]\n_target_: mine.Mine\nseed: ${train.seed}\n")


def job(number):
    return Path(f"runs/sweep/{number}").absolute()


def test_jobs_are_runs_of_their_own():
    """In this process, with ranks that only pretend: what is printed, what is left, and how it ends."""
    seen = []

    def start_ranks(config, folder, nproc, *rest):
        seen.append((folder.path, config.train.seed, nproc))
        if folder.path == job(0):
            raise PlaitError("rank 1 was killed by SIGKILL; its log: somewhere")
        if folder.path == job(1):
            return Outcome("failed", "ValueError: made to fail", rank=0)
        if folder.path == job(2):
            raise OSError("no space left")
        return Outcome("finished", "trained to step 4")

    done = plait(*SWEEP, "train.steps=4", "launch.device=cpu", ranks=start_ranks)
    assert done.code == 1
    assert seen == [(job(0), 1, 2), (job(1), 1, 1), (job(2), 2, 2), (job(3), 2, 1)]
    for number, which in enumerate(
        ("=1, strategy=[fsdp2]", "=1, strategy=[]", "=2, strategy=[fsdp2]", "=2, strategy=[]")
    ):
        assert f"plait: job {number} of the sweep (train.seed{which}) starts\n" in done.out
    failures = [line.partition(" failed: ")[2] for line in done.err.splitlines() if line.startswith("plait: job")]
    assert failures[:3] == [
        "rank 1 was killed by SIGKILL; its log: somewhere",
        f"ValueError: made to fail (rank 0; its log: {job(1)}/ranks/rank-0.log)",
        "OSError: no space left",
    ]
    assert failures[3:] == failures[:1]  # once more, at the end
    assert "Traceback" not in done.err
    assert [p.name for p in sorted(Path("runs").iterdir())] == ["sweep"]


def test_a_job_that_does_not_fit_is_named_too():
    """Known before any rank starts: the batch fits one process, and not two."""
    started = []

    def start_ranks(config, folder, *rest):
        started.append(folder.path)
        return Outcome("finished", "trained")

    overrides = ("train.global_batch_size=8", "launch.device=cpu")
    done = plait(*SWEEP, *overrides, ranks=start_ranks)
    assert done.code == 1
    assert started == [job(1), job(3)]
    assert re.search(
        NAMED + r"train\.global_batch_size=8 does not divide .* on 2 data ranks; 16 would$", done.err, re.M
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "launcher", [(), ("hydra/launcher=joblib", "hydra.launcher.n_jobs=2")], ids=["basic", "joblib"]
)
def test_three_finish_and_the_fourth_is_named(tmp_path, launcher):
    from commands import SMALL

    overrides = ("model=mine", *SMALL, "train.steps=6", "validation.interval=0")
    done = command(*SWEEP, *overrides, *launcher, cwd=tmp_path, timeout=280)
    assert done.returncode == 1, done.stderr
    for number in (0, 1, 3):
        assert [r["step"] for r in rows(job(number))] == list(range(1, 7))
        assert (job(number) / "export" / "model.safetensors").exists()
    assert not (job(2) / "export").exists()
    log = re.escape(f"{job(2)}/ranks/rank-")
    sentence = NAMED + rf"ValueError: made to fail, in two lines \(rank [01]; its log: {log}[01]\.log\)$"
    assert re.search(sentence, done.stderr, re.M), done.stderr
    assert "Traceback" not in done.stderr + done.stdout
    assert not re.search(r"address already in use|restarting", done.stderr + done.stdout, re.I)
    assert rows(job(0))[0]["loss"] != rows(job(3))[0]["loss"]  # seeds differ
