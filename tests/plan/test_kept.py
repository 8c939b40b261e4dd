"""Plans and pieces are kept for a process's next question, and never serve another one."""

import attrs

from plait.launch.check import check
from plait.launch.compose import resolve
from plait.plan.engine import plan
from plait.plan.pieces import known, remember

SMALL = ["train.local_batch_size=2", "train.seq_len=32", "validation.interval=0", "model.vocab_size=8192"]
CHUNKS = "loss.chunks=8"


def test_plans_differ_by_chunks_of_the_loss() -> None:
    whole, chunked, again = (plan(resolve([*SMALL, *more]), 1).memory for more in ([], [CHUNKS], []))
    assert chunked.logits < whole.logits == again.logits


def test_pieces_differ_by_chunks_of_the_loss() -> None:
    run = check(resolve(SMALL), 1)
    asked = run.config, run.layout, {}, 7
    remember(*asked, [])
    assert known(*asked) == []
    assert known(attrs.evolve(run.config, loss=check(resolve([*SMALL, CHUNKS]), 1).config.loss), *asked[1:]) is None
