"""The trainer on one GPU: it goes on bitwise from a checkpoint that was saved meanwhile, and no step waits."""

import signal
import threading
import time
from unittest import mock

import pytest

from plait.host import check, compose
from plait_testing import whole_run


def trained(node, folder, guarded=(), stop_after=0, export=False):
    """The rows of a run; its exported weights are those that it holds.

    guarded: the first and the last step in which a call that waits for the GPU is an error.
    """
    import torch
    import torch.distributed.checkpoint as dcp
    from safetensors.torch import load_file

    from plait.parallel.state import weights
    from plait.records.run_folder import RunFolder
    from plait.train.trainer import Trainer

    seen = whole_run.Rows(lambda step: after(step))
    trainer = Trainer(node, RunFolder(folder), lambda text: None, [seen])
    trainer.restore()
    waits = torch.cuda.set_sync_debug_mode if trainer.device.type == "cuda" else lambda mode: None

    def after(step):
        if guarded and step in (guarded[0] - 1, guarded[1]):
            waits("error" if step < guarded[1] else "default")
        if step == stop_after:
            trainer.ask_to_stop(signal.SIGTERM)

    def late(*args, **kwargs):
        """A save that a thread writes begins to be written after the next step has changed the parameters."""
        began, deadline = trainer.step, time.monotonic() + 0.5
        while threading.current_thread() is not threading.main_thread() and trainer.step == began:
            time.sleep(0.001)
            if time.monotonic() > deadline:  # there was no next step
                break
        return save(*args, **kwargs)

    save = dcp.save
    try:
        with mock.patch.object(dcp, "save", late):
            trainer.fit()
    finally:
        waits("default")
    if export:
        trainer.checkpoints.export()
        exported = load_file(folder / "export" / "model.safetensors")
        held = {name: tensor.cpu() for name, tensor in weights(trainer.applied.checkpoint()[0]).items()}
        assert held.keys() == exported.keys()
        assert all(torch.equal(held[name], exported[name]) for name in held)
    return seen.rows


def given(device, folder, *overrides):
    more = (f"launch.device={device}", "train.deterministic=true", "checkpoint.keep=9", *overrides)
    return whole_run.overrides({"fsdp2": {}}, folder, 1, *more)


def run(ranks, device, folder, *overrides, **options):
    """As `trained`, of a small model under fsdp2 on one rank with that device, with repeatable kernels."""
    folder.mkdir(exist_ok=True)
    (folder / "versions.json").write_text("{}")
    node = check(compose(given(device, folder, *overrides)), 1).config
    return ranks.run(trained, node, folder, world=1, **options)[0]


OFTEN = ("train.steps=6", "checkpoint.interval=2")


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_a_run_goes_on_bitwise_from_a_save(ranks, device, tmp_path, mode):
    """The run that saved goes on while the save is written, and is also stopped and resumed."""
    often = (*OFTEN, f"checkpoint.mode={mode}")
    whole = run(ranks, device, tmp_path / "whole", *often, export=True)
    kind = "cuda_allocator_peak" if device == "cuda" else "resident_peak"
    assert {row["memory_kind"] for row in whole} == {kind}
    saved = tmp_path / "whole" / "checkpoints" / "step-2"
    later = run(ranks, device, tmp_path / "later", *often, f"checkpoint.load={saved}")
    assert whole_run.numbers(later) == whole_run.numbers(whole[2:])
    parts = [run(ranks, device, tmp_path / "parts", *often, stop_after=stop) for stop in (2, 0)]
    assert [len(rows) for rows in parts] == [3, 3]  # it ends with the step after it was asked
    assert whole_run.numbers(parts[0] + parts[1]) == whole_run.numbers(whole)


NEVER = ("checkpoint.interval=0", "validation.interval=0", "train.deterministic=false", "train.steps=6")
COMPILED = ("compile.enabled=true", "compile.backend=aot_eager", "precision.param=bfloat16", "data.attention=across")


@pytest.mark.parametrize("options", [(), COMPILED], ids=["documents", "compiled"])
def test_no_step_waits_for_the_gpu(ranks, device, tmp_path, options):
    """Steps 3 to 5, of four micro-batches each, their metrics included."""
    rows = run(ranks, device, tmp_path / "run", *NEVER, *options, guarded=(3, 5))
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
