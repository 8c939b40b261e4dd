"""A start takes exported weights as those of its last step only if a run ended with them."""

import pytest

from plait.check.resume import _is_exported
from plait.host import Outcome, RunFolder

OUTCOMES = {
    "finished": (Outcome("finished", "", step=30), True),
    "finished earlier": (Outcome("finished", "", step=20), False),
    "finished later": (Outcome("finished", "", step=40), False),
    "killed before it had exported": (None, False),
    "stopped": (Outcome("stopped", "", step=30), False),
}


@pytest.mark.parametrize("case", OUTCOMES)
def test_weights_of_another_step_are_written_again(case, tmp_path):
    """As after a run to step 20 that was to go on to step 30, and was killed with its last checkpoint written."""
    outcome, expected = OUTCOMES[case]
    (tmp_path / "export").mkdir()
    (tmp_path / "export/model.safetensors").write_bytes(b"weights")
    if outcome is not None:
        RunFolder(tmp_path).set_outcome(outcome)
    assert _is_exported(30, RunFolder(tmp_path), print) == expected
