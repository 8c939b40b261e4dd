"""What `plait verify` asks of its ranks, and when. None is started."""

import contextlib
import signal
from types import SimpleNamespace

import pytest

from plait import ModelSpec, PlaitError
from plait.commands.main import run
from plait.contract.config import Config
from plait_testing.declared import LAST
from plait_testing.finding import Finding
from plait_testing.pool import RankError
from plait_testing.verify import _run

pytest.importorskip("plait_tensor_parallel")
pytest.importorskip("plait_fsdp2")


class Ranks:
    """A pool that trains nothing, and notes what it was asked and what had been printed into `file` before.

    found: what each comparison finds. bounds: by how much rounding grows."""

    def __init__(self, file=None, found=((),), bounds=None):
        self.file, self.found, self.bounds = file, iter(found), bounds
        self.asked, self.read, self.closed = [], [], False

    def run(self, task, trial, *given, world, timeout):
        self.asked.append((task.__name__, trial, given, world))
        self.read += [self.file.read_text()] if self.file else []
        if task.__name__ == "compare":
            return [([*next(self.found)], {})] * world
        return [0.0 if task.__name__ == "reference" else self.bounds]

    def close(self):
        self.closed = True


def run_on(pool, monkeypatch):
    """What is found by a pool of 4 ranks, of which two have a part of the batch."""
    monkeypatch.setattr("plait_testing.pool.Pool", lambda world: pool)
    layout = SimpleNamespace(world_size=4, count={"batch": 2, "sequence": 1, "tensor": 2}.get)
    checked = SimpleNamespace(config=Config(model={"vocab_size": 50}), layout=layout, shapes={}, source=None)
    return _run(checked, ModelSpec(axes={}, blocks=["blocks.*"]), False, 2, print)


def test_each_data_rank_has_samples_of_its_own(monkeypatch):
    """In the one process too: both train on the same."""
    pool = Ranks()
    assert run_on(pool, monkeypatch) == ([], {})
    assert [(trial.data_ranks, trial.vocab) for _, trial, _, _ in pool.asked] == [(2, 50)] * 2


def test_what_may_be_rounding_is_compared_again_with_its_bounds(monkeypatch):
    small, fine, bounds = Finding(LAST, 1e-9, 1e-7, "w"), Finding(LAST, 6e-7, 1e-7, "w"), {LAST: 6e-7}
    pool = Ranks(found=[[small], [fine]], bounds=bounds)
    assert run_on(pool, monkeypatch) == ([fine], {})
    tasks, trials, given, worlds = zip(*pool.asked, strict=True)
    assert tasks == ("reference", "compare", "grown", "compare")
    assert worlds == (1, 4, 1, 4)
    assert (trials[2], trials[3]) == trials[:2]
    assert given[3] == (*given[1], bounds)


class Broken(Ranks):
    def run(self, *asked, **options):
        raise RankError("rank 0: out of memory")


@pytest.mark.parametrize(
    ("pool", "ends"),
    [
        (Ranks(), contextlib.nullcontext()),
        (Broken(), pytest.raises(PlaitError, match="in one process: rank 0: out of memory")),
    ],
    ids=["fine", "broken"],
)
def test_ranks_end_whatever_they_answer(pool, ends, monkeypatch):
    """And Ctrl-C does what it did before."""
    before = signal.getsignal(signal.SIGINT)
    with ends:
        run_on(pool, monkeypatch)
    assert pool.closed
    assert signal.getsignal(signal.SIGINT) is before


def test_a_reader_knows_the_ranks_and_their_batch_before_they_train(tmp_path, monkeypatch):
    """The reader of a pipe or a file, which gets nothing that is not flushed: on large models it takes minutes."""
    pool = Ranks(tmp_path / "out")
    monkeypatch.setattr("plait_testing.pool.Pool", lambda world: pool)
    with pool.file.open("w") as out, contextlib.redirect_stdout(out):
        assert run("verify", ["strategy=[tensor_parallel,fsdp2]", "model.n_layers=1", "train.seq_len=8"]) == 0
    assert "dp_shard=2 (fsdp2), tp=2 (tensor_parallel)" in pool.read[0]
    assert "batch   4 samples of 8 random tokens" in pool.read[0]
    assert pool.read[0].endswith("\n")
