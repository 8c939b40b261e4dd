"""The curves of a run, through kills and resumes."""

import time
from pathlib import Path

from plait_tensorboard import TensorBoard


def scalars(folder: Path, key: str) -> list[tuple[int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return [(e.step, e.value) for e in events.Scalars(key)]


def wait_for_events(folder: Path, count: int) -> None:
    deadline = time.monotonic() + 10
    while len(scalars(folder, "loss")) < count:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_curves_go_on_where_the_run_does(tmp_path: Path) -> None:
    first, second = TensorBoard(), TensorBoard()
    first.open(tmp_path, {}, 0)
    for step in range(1, 7):
        first.log({"step": step, "loss": 1.0, "mfu": None, "memory_kind": "resident_peak"})
    wait_for_events(tmp_path / "tensorboard", 6)  # not closed: what a killed run leaves
    second.open(tmp_path, {}, 3)
    for step in (4, 5):
        second.log({"step": step, "loss": 2.0})
    second.close()
    assert scalars(tmp_path / "tensorboard", "loss") == [(1, 1.0), (2, 1.0), (3, 1.0), (4, 2.0), (5, 2.0)]
    first.close()
