"""What a run that cannot fit is told of the machines that it has."""

from types import SimpleNamespace

import pytest

from plait.check import memory
from plait.contract.config import Config, Launch, Train
from plait.testing import raises_about


@pytest.mark.parametrize(
    ("nnodes", "machines"), [(1, "this machine has 9.77 KiB"), (2, "2 machines like this one have 19.53 KiB")]
)
def test_a_refusal_counts_the_machines_and_their_memory(monkeypatch, nnodes, machines):
    monkeypatch.setattr(memory, "_memory", lambda: 10_000)
    config = Config(train=Train(seq_len=1, local_batch_size=1), launch=Launch(nnodes=nnodes))
    layout = SimpleNamespace(count=lambda kind: 1)
    with raises_about("precision.storage") as caught:
        memory.check_room(SimpleNamespace(config=config, layout=layout, shapes={"weight": (100, 100)}))
    assert machines in str(caught.value)
