"""Where the rows of a run go beside metrics.jsonl: the sinks that a config selects, and the core's own. Rank 0 only."""

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import attrs

from plait.contract.config import Config, Metrics
from plait.contract.errors import PlaitError, absent
from plait.contract.observer import RunObserver
from plait.records.metrics import FILE, MetricsFile
from plait.strategies.blame import blaming
from plait.strategies.registry import create_all, installed
from plait.system.disk import replace


class Sink(Protocol):
    """An attrs class that an entry point in `plait.sinks` names. Its fields are its options: sink.<name>.<field>."""

    def open(self, folder: Path, config: Mapping[str, Any], step: int) -> None:
        """Before the first row. folder: the run's. config: the run's, in plain values. step: the run continues after
        it; rows past it, from an earlier attempt, come again. 0: it begins."""

    def log(self, row: Mapping[str, Any]) -> None:
        """A line of metrics.jsonl: "step", "loss", ... and what plugins logged. Every step once, in order."""

    def close(self) -> None:
        """After the last row; also if the run fails."""


class MetricsSinks(RunObserver):
    """metrics.jsonl and all sinks that `config` selects; they get one row per step.

    folder: the run's. resume_step: the step that the run continues from, 0 for a new one; rows past it from an earlier
    attempt are dropped. Raises PlaitError if a sink cannot be made.
    """

    def __init__(self, folder: Path, config: Config, resume_step: int = 0) -> None:
        check(config.metrics)
        self.sinks: dict[str, Sink] = create_all(selected(config), "sink")
        self._file = MetricsFile(folder / FILE)
        self._file.resume(resume_step)
        values = config.plain()
        for name, sink in self.sinks.items():
            with blaming(name, "method 'open'", "sink"):
                sink.open(folder, values, resume_step)

    def row(self, row: Mapping[str, Any]) -> None:
        self._file.log(row)
        for name, sink in self.sinks.items():
            with blaming(name, "method 'log'", "sink"):
                sink.log(row)

    def close(self) -> None:
        self._file.close()
        for name, sink in self.sinks.items():
            with blaming(name, "method 'close'", "sink"):
                sink.close()

    def __enter__(self) -> "MetricsSinks":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            self.close()
        except Exception:
            if kind is None:  # otherwise the run is ending for another reason, which is the one to report
                raise


def selected(config: Config) -> dict[str, Any]:
    """Name -> options of the sinks of a run: those of `sink`, and those that `metrics` switches on."""
    curves = config.metrics.tensorboard
    if curves is None:
        curves = (plugin := installed("sink").get("tensorboard")) is not None and plugin.state == "ok"
    on = {"tensorboard": curves, "wandb": config.metrics.wandb}
    return {**{name: {} for name, wanted in on.items() if wanted}, **config.sink}


def check(conf: Metrics) -> None:
    """Raises PlaitError if `conf` asks for a library that is not installed; imports none, so the parent may call it."""
    if conf.wandb and importlib.util.find_spec("wandb") is None:
        raise PlaitError("metrics.wandb=true, but wandb is not installed; `pip install wandb`, or set it to false").at(
            "metrics.wandb", True, fits=(False,)
        )
    if conf.tensorboard and "tensorboard" not in installed("sink"):
        said = absent("metrics.tensorboard=true", "plait-tensorboard")
        raise PlaitError(said).at("metrics.tensorboard", True, fits=(None, False))


@attrs.define
class Wandb:
    """A run of Weights & Biases, which the same command continues. project: its name there."""

    project: str = "plait"
    _run: Any = attrs.field(init=False)

    def open(self, folder: Path, config: Mapping[str, Any], step: int) -> None:
        import wandb

        remembered = folder / "wandb.id"  # the same command continues the same curves
        if not remembered.exists():
            replace(remembered, wandb.util.generate_id())
        self._run = wandb.init(
            project=self.project,
            name=str(config["run"]["name"] or folder.name),
            id=remembered.read_text(encoding="utf-8"),
            resume="allow",
            dir=str(folder),
            config=config,
        )

    def log(self, row: Mapping[str, Any]) -> None:
        self._run.log(numbers(row), step=row["step"])

    def close(self) -> None:
        self._run.finish()


def numbers(row: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a row, without its step."""
    return {
        key: value
        for key, value in row.items()
        if key != "step" and isinstance(value, int | float) and not isinstance(value, bool)
    }
