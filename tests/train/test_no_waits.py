"""Nothing in a step asks for a tensor's value: on a GPU the host would wait for the device."""

import sys
from unittest import mock

import cloudpickle
import pytest

from plait.host import check, compose
from plait_testing import whole_run

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # ranks cannot import a test


def waits(node, folder, planted=False):
    """(operators of the second step that wait for a value, the step that its row of metrics tells).

    The optimizer is left out: torch's for CPUs reads its count of steps. So are labels, which lie in main memory.
    """
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    from plait.contract.batch import Batch
    from plait.records.run_folder import RunFolder
    from plait.train import trainer as module

    found = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & set(func.tags):
                found.append(func.name())
            return func(*args, **(kwargs or {}))

    trainer = module.Trainer(node, RunFolder(folder), lambda text: None)
    trainer.restore()
    trainer.train_step()[0].row()
    if planted:
        real, cls = trainer.applied.clip_grads, type(trainer.applied)
        mock.patch.object(cls, "clip_grads", lambda self, norm: torch.tensor(float(real(norm)))).start()
    on_host = mock.patch.object(Batch, "valid", return_value=100)
    with mock.patch.object(trainer.optimizer, "step"), on_host, Watch():
        metrics, _ = trainer.train_step()
    mock.patch.stopall()
    return found, metrics.row()["step"]


LAYOUTS = [
    ({}, 1),
    ({"fsdp2": {}}, 2),
    *(pytest.param(s, 2, marks=pytest.mark.slow) for s in ({"tensor_parallel": {"degree": 2}}, {"simplefsdp": {}})),
]


def run(ranks, folder, strategies, world, *overrides, **options):
    node = check(compose(whole_run.overrides(strategies, folder, world, *overrides)), world).config
    (folder / "own").mkdir()
    (folder / "own" / "versions.json").write_text("{}")
    return ranks.run(waits, node, folder / "own", world=world, **options)


@pytest.mark.parametrize(("strategies", "world"), LAYOUTS)
def test_a_step_waits_for_nothing(plait_ranks, tmp_path, strategies, world):
    assert run(plait_ranks, tmp_path, strategies, world, "loss.chunks=2") == [([], 2)] * world


def test_a_wait_is_seen(plait_ranks, tmp_path):
    assert run(plait_ranks, tmp_path, {}, 1, planted=True) == [(["aten::_local_scalar_dense"], 2)]
