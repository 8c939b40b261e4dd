"""A run that is stopped and goes on, perhaps in another layout, on the ranks of a test's pool."""

import signal
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import cloudpickle

from plait.host import check, compose
from plait_testing import whole_run
from plait_testing.trial import held

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # ranks cannot import a test's helper

Part = tuple[Mapping[str, Mapping[str, Any]], int, int | None]  # strategies, ranks, the step after which it stops


def part(
    config: Any, folder: Path, until: int | None, begin: Callable[[Any], Any] = lambda trainer: None
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """(rows, parameters at the end) of a run that is asked to stop after step `until`. begin: called with the trainer
    first."""
    from plait.records.run_folder import RunFolder
    from plait.train.trainer import Trainer

    watched = whole_run.Rows(lambda step: trainer.ask_to_stop(signal.SIGTERM) if step == until else None)
    trainer = Trainer(config, RunFolder(folder), lambda text: None, [watched])
    begin(trainer)
    trainer.restore()
    trainer.fit()
    return watched.rows, held(trainer.applied)


def in_parts(
    ranks: Any, folder: Path, name: str, parts: Iterable[Part], *overrides: str, run: Callable[..., Any] = part
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """(rows of all parts, parameters at the end) of the run `name`, of the first rank. run: what ranks do."""
    (folder / name).mkdir()
    (folder / name / "versions.json").write_text("{}")
    given = ["model.vocab_size=258", "validation.interval=0", f"run.name={name}", *overrides]
    rows, end = [], {}
    for strategies, world, until in parts:
        config = check(compose(whole_run.overrides(strategies, folder, world, *given)), world).config
        (found, end), *_ = ranks.run(run, config, folder / name, until, world=world)
        rows += found
    return rows, end
