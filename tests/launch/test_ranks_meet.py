"""What a rank of several machines reports if something fails before all are together."""

import json

import pytest

from plait.check import prepare
from plait.contract.errors import PlaitError
from plait.host import compose
from plait.launch import rank, rank_end
from plait.records.run_folder import RunFolder
from plait.system.errors import unpacked


@pytest.fixture
def end_of(tmp_path, monkeypatch):
    """What the rank returns and reports if `prepare_together` raises the error."""
    node = tmp_path / "config.json"
    node.write_text(json.dumps({"config": compose(["strategy=[]"]).plain(), "files": {}}))
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("PLAIT_SCRATCH", str(tmp_path))

    def end(error):
        def raises(*_):
            raise error

        monkeypatch.setattr(prepare, "prepare_together", raises)
        outcome = rank._under_elastic(RunFolder(tmp_path / "runs" / "a"), node)
        return outcome, rank_end.read(tmp_path)

    return end


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (RuntimeError("Gloo connectFullMesh failed: timed out connecting"), "lost"),
        (ConnectionRefusedError(111, "Connection refused"), "failed"),
    ],
)
def test_an_error_of_the_network_may_pass(end_of, error, kind):
    outcome, ends = end_of(error)
    assert (outcome.kind, outcome.rank) == ("failed", 1)
    assert [(end.kind, end.repeats) for end in ends.values()] == [(kind, False)]


def test_a_mistake_would_repeat(end_of):
    _, ends = end_of(KeyError("x"))
    assert [(end.kind, end.repeats) for end in ends.values()] == [("failed", True)]


def test_a_refusal_is_for_the_launcher(end_of, tmp_path):
    outcome, ends = end_of(PlaitError("the machines differ").at("run.name"))
    assert (outcome, ends) == (None, {})
    assert str(unpacked((tmp_path / "problem").read_text())) == "the machines differ"
