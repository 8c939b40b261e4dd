"""The trainer computes with a batch while the next one is read."""

import sys
import textwrap
import threading
from unittest import mock

import cloudpickle

from plait.host import check, compose
from plait.testing import whole_run
from tests.helpers import one_rank
from tests.helpers.commands import rows

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # ranks cannot import a test


def read_meanwhile(node, folder):
    """For each step: whether the batch of the next one was read before this one's computation ended; and how many
    batches were read."""
    from plait.data.packed import PackedBatches
    from plait.parallel.apply import Applied
    from plait.records.run_folder import RunFolder
    from plait.train.trainer import Trainer

    steps = node.train.steps
    read, found = [threading.Event() for _ in range(steps + 1)], []
    real_take, real_clip = PackedBatches.take, Applied.clip_grads

    def take(self, first):
        batch = real_take(self, first)
        read[first // self.global_batch_size].set()
        return batch

    def clip(self, norm):  # after backward
        if trainer.step + 1 < steps:
            found.append(read[trainer.step + 1].wait(20))
        return real_clip(self, norm)

    trainer = Trainer(node, RunFolder(folder), lambda text: None)
    with mock.patch.object(PackedBatches, "take", take), mock.patch.object(Applied, "clip_grads", clip):
        trainer.fit()
    return found, sum(event.is_set() for event in read)


def test_the_next_batch_is_read_before_a_step_ends(plait_ranks, tmp_path):
    options = ("train.steps=3", "checkpoint.enabled=false", "validation.interval=2")
    node = check(compose(whole_run.overrides({}, tmp_path, 1, *options)), 1).config
    (tmp_path / "versions.json").write_text("{}")
    assert plait_ranks.run(read_meanwhile, node, tmp_path, world=1) == [([True, True], 3)]


BROKEN = """
    from plait.contract.errors import PlaitError
    from plait.data.stdlib import Stdlib

    class Broken(Stdlib):
        def open(self, **given):
            batches = super().open(**given)
            take = batches.take

            def taking(first):
                if first >= 2 * batches.global_batch_size:
                    raise PlaitError("the tape is torn after the second batch")
                return take(first)

            batches.take = taking
            return batches
"""


def test_a_source_that_fails_ends_the_run_at_its_step_with_its_sentence(tmp_path):
    (tmp_path / "broken.py").write_text(textwrap.dedent(BROKEN))
    done = one_rank.train("data._target_=broken.Broken", "train.steps=5", "run.name=a", cwd=tmp_path)
    assert done.code == 1
    assert "the tape is torn after the second batch" in done.err
    assert [row["step"] for row in rows(tmp_path / "runs" / "a")] == [1]
