"""Counts what steps of torchtitan ask of a simulated GPU, for the run that overrides of `plait train` say.

    .gpu-host/bin/python -m tools.simulated_gpu.peer [--steps 3 4] [--json FILE] OVERRIDES...

benchmarks/torchtitan_run.py makes the same training of it: model, data, batch, precision, recomputation, compilation.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

from tools.simulated_gpu.count import Counted, Window
from tools.simulated_gpu.counter import ROOT, Counter, run_on_the_device


def count(overrides: Sequence[str], first: int, last: int) -> Counted:
    """What steps `first` to `last` of torchtitan on one device ask for; one more is trained."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    import torch
    import torchtitan_run

    torchtitan_run.without_datasets()
    from torchtitan.train import Trainer

    from plait.train import step_metrics

    train_step, peak_memory = Trainer.train_step, step_metrics.peak_memory

    def measured(device: Any) -> tuple[int, str]:
        window.look()
        return peak_memory(device)  # which begins the next one

    def stepped(trainer: Any, batches: Any) -> None:
        window.begins(trainer.step)
        train_step(trainer, batches)

    with tempfile.TemporaryDirectory() as folder:
        window = Window(first, last, Counter(Path(folder)))
        run = ["checkpoint.enabled=false", "validation.interval=0", *overrides, f"train.steps={last + 1}"]
        with (
            mock.patch.object(Trainer, "train_step", stepped),
            mock.patch.object(step_metrics, "peak_memory", measured),
            # Weights stay zeros; torch would compile the inverse of a distribution while it runs.
            mock.patch.object(torch.nn.init, "trunc_normal_", lambda tensor, *_, **__: tensor),
            mock.patch.object(torch.nn.init, "normal_", lambda tensor, *_, **__: tensor),
            mock.patch.object(sys, "argv", ["torchtitan_run.py", f"{folder}/rows", *run]),
        ):
            torchtitan_run.main()
    assert window.counted is not None
    return window.counted


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, nargs=2, default=(3, 4), metavar=("FROM", "TO"), help="that are counted")
    parser.add_argument("--json", type=Path, help="file that the counts go to")
    asked, overrides = parser.parse_known_args()
    run_on_the_device()
    told = json.dumps(count(overrides, *asked.steps).as_json(), indent=1)
    (asked.json.write_text(told, encoding="utf-8") if asked.json else print(told))


if __name__ == "__main__":
    main()
