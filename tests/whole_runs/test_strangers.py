"""Whole commands on folders that a stranger wrote or a disk damaged: one sentence, no traceback, nothing run."""

import os
import pickle
import shutil
from pathlib import Path

import pytest

from tests.helpers.commands import SMALL, plait, train
from tests.helpers.hostile import Calls, plant

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]  # each way in one process: tests/checkpoint/test_hostile.py
ALONE = ("strategy=[]", "train.steps=5")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished run `a`."""
    folder = tmp_path_factory.mktemp("strangers")
    done = train(*ALONE, "run.name=a", cwd=folder)
    assert done.code == 0, done.out + done.err
    return folder


def refused(runs: Path, sentence: str, *arguments: str) -> None:
    done = train(*arguments[1:], cwd=runs) if arguments[0] == "train" else plait(*arguments, cwd=runs)
    assert done.code == 1, done.out + done.err
    assert sentence in done.err
    assert "Traceback" not in done.out + done.err


def test_a_planted_checkpoint_runs_nothing(runs: Path) -> None:
    path = shutil.copytree(runs / "runs/a/checkpoints/step-5", runs / "step-5")
    plant(path, pickle.dumps(Calls(os.system, f"touch {runs / 'marker'}")))
    sentence = "its .metadata is refused, since it names 'posix.system', which is not part of torch's metadata"
    refused(runs, sentence, "train", *ALONE, "run.name=b", f"checkpoint.load={path}", "train.steps=6")
    refused(runs, sentence, "train", *ALONE, "run.name=c", f"checkpoint.init_from={path}")
    shutil.rmtree(runs / "runs/a/checkpoints/step-5")
    shutil.copytree(path, runs / "runs/a/checkpoints/step-5")
    refused(runs, sentence, "train", *ALONE, "run.name=a", "train.steps=6")
    model = [override for override in SMALL if override.startswith("model.")]
    refused(runs, sentence, "convert", str(path), "out", "--to", "hf", *model)
    assert not (runs / "marker").exists()
    assert not (runs / "out").exists()


def test_a_flipped_bit_of_exported_weights_is_found_before_a_rank_starts(runs: Path) -> None:
    weights = shutil.copytree(runs / "runs/a/export", runs / "weights")
    content = bytearray((weights / "model.safetensors").read_bytes())
    content[-1] ^= 0x40
    (weights / "model.safetensors").write_bytes(content)
    sentence = "model.safetensors was changed after SHA256SUMS was written"
    refused(runs, sentence, "train", *ALONE, "run.name=d", "checkpoint.init_from=weights")
    assert not list((runs / "runs").glob("d/ranks/*"))
