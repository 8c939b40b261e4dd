"""`plait push`: the model card says what the run recorded, and one commit has it beside the weights."""

import functools
import json
import shutil
from types import SimpleNamespace

import huggingface_hub
import pytest
import yaml

from plait.host import Outcome, RunFolder, compose
from plait_use.card import hub_id
from plait_use.shareable import shortened

VALUES = ["train.steps=20", "optimizer.lr=0.002", "strategy=[fsdp2]", "run.name=done", "data=text"]


@functools.cache
def composed():
    return compose([*VALUES, "data.path=text.txt"])


@pytest.fixture
def project(plait_project):
    """A folder with a run `done`, which has exported, and a run `early` without weights."""
    for name in ("done", "early"):
        folder = RunFolder(plait_project.path / "runs" / name)
        folder.path.mkdir(parents=True)
        folder.write_config(composed().with_value("data.path", f"{plait_project.path}/secret/text.txt").plain())
        folder.write_versions({"torch": "2.99", "data": "digest"})
        folder.write_mesh({"world_size": 2, "dense": [{"name": "dp_shard", "degree": 2}], "views": {}})
        folder.set_outcome(Outcome("finished", "trained", step=20))
        rows = [{"step": step, "loss": 9 - step / 10, "tokens": step * 512} for step in range(1, 21)]
        rows[9] |= {"val_loss": 6.5, "val_loss/code": 6.0}
        folder.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    export = plait_project.path / "runs/done/export"
    export.mkdir()
    (export / "model.safetensors").write_bytes(b"weights")
    (export / "README.md").write_text("of the base model")
    return plait_project


def parts(text):
    """(the front matter, the rest) of a card."""
    _, head, rest = text.split("---\n", 2)
    return yaml.safe_load(head), rest


def test_the_card_says_what_the_run_recorded(project):
    told = project("push", "done", "me/speller", "--folder", "out")
    assert told.code == 0, told.err
    assert {each.name for each in (project.path / "out").iterdir()} == {"README.md", "model.safetensors"}
    head, rest = parts((project.path / "out/README.md").read_text())
    assert head == {"tags": ["plait"]}
    for line in (
        "# speller",
        "on `text.txt`, 20 steps.",
        "| training loss | 7.0000 after step 20 |",
        "| validation loss | 6.5000 after step 10 |",
        "| validation loss, code | 6.0000 after step 10 |",
        "| tokens seen | 10,240 |",
        "| `optimizer.lr` | `0.002` |",
        "| strategies | fsdp2 |",
        "| mesh | dp_shard=2 |",
        "| torch | 2.99 |",
    ):
        assert line in rest
    assert str(project.path) not in rest  # no folder of this machine
    recorded = yaml.safe_load(rest.split("```yaml\n")[1].split("```")[0])
    assert recorded["train"]["steps"] == 20
    assert "7 bytes  model.safetensors" in told.out


def test_the_card_has_no_secrets_and_no_folders(project):
    config = compose(VALUES[:-1]).plain()
    config["data"] |= {
        "path": "https://planted:planted@host/set?sig=planted",
        "token": "planted",
        "data_files": {"/planted/me/train.jsonl": 1, "file:///planted/b": "file:///planted/me/held.jsonl"},
        "options": ["/planted/me", "--dir=/planted/me/x", {"api_key": "planted", "credentials": {"user": "planted"}}],
        "dsn": "host=db password=planted",
        "eod_token": "</s>",
        "tokenizer": "~/planted/tokens",
    }
    config["optimizer"] |= {"HF_TOKEN": "planted", "state": "/planted/state"}
    config["checkpoint"]["init_from"] = "/planted/base"
    config["launch"]["rdzv_endpoint"] = "planted.internal:29500"
    config["sink"] = {"server": {"address": "http://planted.internal"}}
    folder = RunFolder(project.path / "runs/done")
    folder.write_config(config)
    folder.metrics.write_text(json.dumps({"step": 20, "loss": 2.0, "val_loss//planted/me/x": 2.0}) + "\n")
    told = project("push", "done", "me/speller", "--dry-run")
    assert told.code == 0, told.err
    assert "planted" not in told.out
    data = yaml.safe_load(told.out.split("```yaml\n")[1].split("```")[0])["data"]
    assert data["data_files"] == {"train.jsonl": 1, "b": "held.jsonl"}
    assert (data["path"], data["token"], data["eod_token"]) == ("https://host/set", "(secret)", "</s>")
    assert "Fine-tuned from `base`" in told.out


@pytest.mark.parametrize("text", ["a/b", "./a/b", "s3://bucket/a/b", "{{ a / b }}</s></s>", "models.a:B", "/"])
def test_what_is_no_secret_and_no_folder_stays(text):
    assert shortened(text) == text


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B"),
        ("/cache/models--Qwen--Qwen3-0.6B/snapshots/1a2b", "Qwen/Qwen3-0.6B"),
        ("/models/Qwen3", None),
        ("runs/base/export", None),
        ("runs/done", None),  # a folder that is there
        (None, None),
    ],
)
def test_the_base_model_is_one_of_the_hub(path, name, project, monkeypatch):
    monkeypatch.chdir(project.path)
    assert hub_id(path) == name


def test_other_weights_of_the_run_have_no_step_and_no_results(project):
    shutil.copytree(project.path / "runs/done/export", project.path / "runs/done/earlier")
    told = project("push", "runs/done/earlier", "me/speller", "--dry-run")
    assert told.code == 0, told.err
    assert "## Results" not in told.out
    assert "20 steps" not in told.out


def test_a_loss_that_is_not_finite_is_said(project):
    (project.path / "runs/done/metrics.jsonl").write_text('{"step": 20, "loss": null}\n')
    told = project("push", "done", "me/speller", "--dry-run")
    assert "| training loss | not finite after step 20 |" in told.out


@pytest.mark.parametrize("case", ["stopped", "goes on", "finished without an export"])
def test_weights_of_an_earlier_step_are_refused(case, project):
    folder = RunFolder(project.path / "runs/done")
    if case == "goes on":
        folder.clear_outcome()
    elif case == "stopped":
        folder.set_outcome(Outcome("stopped", "by a signal", step=15))
    else:
        folder.write_config(compose([*VALUES, "data.path=x", "checkpoint.export=false"]).plain())
    for word in ("done", "runs/done/export"):
        told = project("push", word, "me/speller", "--dry-run")
        assert (told.code, told.out, told.err.count("\n")) == (1, "", 1)
        assert "has not exported its weights after its last step" in told.err


def test_a_dry_run_writes_nothing(project):
    before = sorted(project.path.rglob("*"))
    told = project("push", "runs/done/export", "me/speller", "--dry-run")
    assert (told.code, sorted(project.path.rglob("*"))) == (0, before)
    assert "# speller" in told.out


def test_one_commit_has_the_card_and_the_weights(project, monkeypatch):
    made = []

    class Api:
        def create_repo(self, repo, private, exist_ok):
            made.append((repo, private, exist_ok))

        def create_commit(self, repo, operations, commit_message):
            made.append({each.path_in_repo: each.path_or_fileobj for each in operations})
            return SimpleNamespace(commit_url=f"https://hub/{repo}/commit/1")

    monkeypatch.setattr(huggingface_hub, "HfApi", Api)
    told = project("push", "done", "me/speller", "--private")
    assert (told.code, told.out) == (0, "https://hub/me/speller/commit/1\n")
    assert made[0] == ("me/speller", True, True)
    assert set(made[1]) == {"README.md", "model.safetensors"}
    assert b"# speller" in made[1]["README.md"]


def refusing(*_, **__):
    raise OSError("no token")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["early", "me/a"], "early has no exported weights to publish"),
        (["dene", "me/a"], "did you mean 'done'?"),
        (["done", "a model"], "REPO is 'a model'"),
        (["runs", "me/a"], "runs is in no run's folder"),
        (["done", "me/a", "--folder", "runs"], "--folder runs is there already"),
        (["done", "me/a"], "me/a cannot be published: OSError: no token; hf auth login sets a token"),
    ],
)
def test_what_does_not_fit_is_one_sentence(words, sentence, project, monkeypatch):
    monkeypatch.setattr(huggingface_hub.HfApi, "create_repo", refusing)
    told = project("push", *words)
    assert (told.code, told.err.count("\n")) == (1, 1)
    assert sentence in told.err
