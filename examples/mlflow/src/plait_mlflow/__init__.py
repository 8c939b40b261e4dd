"""Sends the rows of a run to MLflow's tracking. The same command continues the same MLflow run."""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
from attrs.validators import ge

REMEMBERED = "mlflow.id"  # in the run's folder: the MLflow run that a resumed run continues


@attrs.define
class MLflow:
    """uri: of the tracking store. experiment: its name there. every: steps between rows that are sent."""

    uri: str | None = None
    experiment: str = "plait"
    every: int = attrs.field(default=1, validator=ge(1))
    _client: Any = attrs.field(init=False)
    _run: str = attrs.field(init=False)

    def open(self, folder: Path, config: Mapping[str, Any], step: int) -> None:
        from mlflow.tracking import MlflowClient

        self._client = MlflowClient(tracking_uri=self.uri)
        remembered = folder / REMEMBERED
        if remembered.exists() and step > 0:
            self._run = remembered.read_text(encoding="utf-8")
            self._client.update_run(self._run, status="RUNNING")
            return
        known = self._client.get_experiment_by_name(self.experiment)
        where = known.experiment_id if known else self._client.create_experiment(self.experiment)
        self._run = self._client.create_run(where, run_name=folder.name).info.run_id
        remembered.write_text(self._run, encoding="utf-8")
        self._client.log_dict(self._run, dict(config), "config.json")

    def log(self, row: Mapping[str, Any]) -> None:
        from mlflow.entities import Metric

        if row["step"] % self.every == 0 or "val_loss" in row:
            now = int(time.time() * 1000)
            numbers = {k: float(v) for k, v in row.items() if isinstance(v, int | float) and k != "step"}
            self._client.log_batch(self._run, [Metric(k, v, now, row["step"]) for k, v in numbers.items()])

    def close(self) -> None:
        self._client.set_terminated(self._run)
