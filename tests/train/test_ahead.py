"""The trainer computes with a batch while the next one is read."""

import sys
import textwrap
import threading
from unittest import mock

import cloudpickle
import pytest

from plait.host import check, compose
from plait_testing import whole_run
from tests.helpers import one_rank
from tests.helpers.commands import rows

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # ranks cannot import a test


def read_meanwhile(node, folder):
    """For each step: whether the batch of the next one was read before this one's computation ended; and how many
    batches were read."""
    from plait.parallel.applied import Applied
    from plait.records.run_folder import RunFolder
    from plait.train.trainer import Trainer
    from plait_data.packed import PackedBatches

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


TORN = """
    import time
    from plait.contract.errors import PlaitError
    from plait_data.stdlib import Stdlib

    class Torn(Stdlib):
        def open(self, **given):
            batches = super().open(**given)
            take, validation = batches.take, batches.validation

            def taking(first):
                if first >= 6 * batches.global_batch_size:
                    raise PlaitError("the tape is torn after the sixth batch")
                return take(first)

            def slowly(index):
                time.sleep(0.7)
                return validation(index)

            batches.take, batches.validation = taking, slowly
            return batches
"""


@pytest.fixture(scope="module")
def torn(tmp_path_factory):
    """(how a run on such a source ended, its rows of metrics)."""
    folder = tmp_path_factory.mktemp("torn")
    (folder / "torn.py").write_text(textwrap.dedent(TORN))
    source = ("data._target_=torn.Torn", "validation.interval=2", "validation.batches=1", "train.steps=9")
    done = one_rank.train(*source, "checkpoint.enabled=false", "run.name=a", cwd=folder)
    return done, rows(folder / "runs" / "a")


@pytest.mark.slow
def test_a_source_that_fails_ends_the_run_at_its_step_with_its_sentence(torn):
    done, found = torn
    assert done.code == 1
    assert "the tape is torn after the sixth batch" in done.err
    assert [row["step"] for row in found] == [1, 2, 3, 4, 5]


def test_tokens_a_second_are_over_the_time_that_really_passed(torn):
    seconds = [torn[1][0]["tokens"] / row["tokens_per_second"] for row in torn[1]]
    assert min(seconds[2], seconds[4]) >= 0.7  # the second and the fourth are followed by a validation
