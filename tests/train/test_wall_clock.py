"""Tokens a second are tokens over the time that really passed."""

import textwrap

from tests.helpers import one_rank
from tests.helpers.commands import rows

SLOW = """
    import time
    from plait.data.stdlib import Stdlib

    class Slow(Stdlib):
        def open(self, **given):
            batches = super().open(**given)
            validation = batches.validation

            def slowly(index):
                time.sleep(0.7)
                return validation(index)

            batches.validation = slowly
            return batches
"""


def test_what_lies_between_steps_counts(tmp_path):
    (tmp_path / "slow.py").write_text(textwrap.dedent(SLOW))
    source = ["data._target_=slow.Slow", "validation.interval=2", "validation.batches=1", "train.steps=5"]
    done = one_rank.train(*source, "checkpoint.enabled=false", "run.name=a", cwd=tmp_path)
    assert done.code == 0, done.err
    found = rows(tmp_path / "runs" / "a")
    tokens = found[0]["tokens"]
    seconds = [tokens / row["tokens_per_second"] for row in found]
    assert min(seconds[2], seconds[4]) >= 0.7  # the second and the fourth are followed by a validation
