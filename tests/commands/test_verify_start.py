"""What `plait verify` is about to do is said before it is done: on large models the first training takes minutes."""

import contextlib

import pytest

from plait.commands.main import run

pytest.importorskip("plait_tensor_parallel")
pytest.importorskip("plait_fsdp2")

SMALL = ("model.dim=32", "model.n_layers=1", "model.n_heads=2", "model.n_kv_heads=2", "model.ffn_dim=64")


class Ranks:
    """A pool that trains nothing, and notes what had been printed into the file when it was asked."""

    def __init__(self, file):
        self.file, self.read = file, []

    def run(self, *_, **__):
        self.read.append(self.file.read_text())
        return [0.0] if len(self.read) == 1 else [([], {})]

    def close(self):
        pass


def test_a_reader_knows_the_ranks_and_their_batch_before_they_train(tmp_path, monkeypatch):
    """The reader of a pipe or a file, which gets nothing that is not flushed."""
    monkeypatch.chdir(tmp_path)
    pool = Ranks(tmp_path / "out")
    monkeypatch.setattr("plait.testing.pool.Pool", lambda world: pool)
    with pool.file.open("w") as out, contextlib.redirect_stdout(out):
        assert run("verify", ["strategy=[tensor_parallel,fsdp2]", *SMALL, "train.seq_len=8"]) == 0
    first = pool.read[0]
    assert "dp_shard=2 (fsdp2), tp=2 (tensor_parallel)" in first
    assert "batch   4 samples of 8 random tokens" in first
    assert first.endswith("\n")
