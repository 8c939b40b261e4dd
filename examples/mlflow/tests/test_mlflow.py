"""A real run into a real tracking store on disk, and the same run continued."""

import pytest
from mlflow.tracking import MlflowClient

RUN = (
    *("train", "run.name=r", "launch.device=cpu", "launch.nproc_per_node=1", "model.n_layers=1", "model.dim=32"),
    *("train.seq_len=16", "train.local_batch_size=1", "validation.interval=2", "checkpoint.export=false"),
    *("sink=[mlflow]", "metrics.tensorboard=false"),
)


@pytest.fixture
def store(tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # the only store that needs no database
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    return f"file:{tmp_path / 'store'}"


@pytest.mark.slow
def test_a_run_and_its_continuation(plait_project, store):
    for steps in (4, 6):
        done = plait_project(*RUN, f"sink.mlflow.uri={store}", f"train.steps={steps}", ranks=1)
        assert (done.code, done.err) == (0, "")
    client = MlflowClient(tracking_uri=store)
    (run,) = client.search_runs([client.get_experiment_by_name("plait").experiment_id])
    assert (run.info.run_name, run.info.status) == ("r", "FINISHED")
    rows = plait_project.rows("r")
    for key in ("loss", "lr", "grad_norm"):
        got = sorted((metric.step, metric.value) for metric in client.get_metric_history(run.info.run_id, key))
        assert got == [(row["step"], row[key]) for row in rows]
    validations = client.get_metric_history(run.info.run_id, "val_loss")
    assert sorted(metric.step for metric in validations) == [2, 4, 6]
    assert [file.path for file in client.list_artifacts(run.info.run_id)] == ["config.json"]


@pytest.mark.slow
def test_a_store_that_cannot_be_used_is_named_before_the_first_step(plait_project, store):
    done = plait_project(*RUN, "sink.mlflow.uri=nonsense://x", "train.steps=2", ranks=1)
    assert done.code == 1
    assert "sink 'mlflow' (plait-mlflow 0.1.0) in its method 'open'" in done.err
