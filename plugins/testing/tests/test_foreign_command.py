"""`plait verify FILE.py::function`, and the action of CI that runs it."""

import json
import os
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.docs.pages import BIN, ROOT, blocks

pytestmark = pytest.mark.slow
ACTION = ROOT / ".github" / "actions" / "verify" / "action.yml"
PAGE = ROOT / "docs" / "verify-any-code.md"


@pytest.fixture
def mine(tmp_path, monkeypatch):
    """The page's file, and a mistake in it: the loss is not that of all labels."""
    text = next(block.text for block in blocks(PAGE) if block.file == "mine.py")
    (tmp_path / "mine.py").write_text(text + "\n\ndef wrong():\n    global loss\n    right = loss\n" + WRONG)
    monkeypatch.chdir(tmp_path)
    return tmp_path


WRONG = """
    batch = random_tokens(vocab=64, shifted=True)
    off = dict.fromkeys(["saved", "steps", "documents", "recomputation", "frozen"], "this is short")
    own = lambda model, batch: right(model, batch) / batch.ranks
    return Comparison(build=Model, parallelize=parallelize, batch=batch, loss=own, mesh={"dp": 2, "tp": 1}, off=off)
"""


def test_right_and_wrong(plait_project, mine):
    done = plait_project("verify", "mine.py::wrong", "--json", "found.json", "--sarif", "found.sarif")
    assert done.code == 1, done.err
    found = json.loads((mine / "found.json").read_text())
    assert found["first"]["cause"]["kind"] == "divided"
    assert found["first"]["cause"]["axis"] == "dp"
    (run,) = json.loads((mine / "found.sarif").read_text())["runs"]
    places = {str(result["locations"][0]["physicalLocation"]["artifactLocation"]["uri"]) for result in run["results"]}
    assert places == {"mine.py"}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("def it():\n    return 1\n", "Comparison"),
        ("def it(model, batch):\n    pass\n", "it wants model, batch"),
        ("def it():\n    return 1 / 0\n", "raised ZeroDivisionError: division by zero (own.py, line 2)"),
        ("def it(:\n", "raised SyntaxError"),
        ("import nowhere\n", "raised ModuleNotFoundError: No module named 'nowhere'"),
        ("", "no function 'it'"),
    ],
)
def test_what_cannot_be_compared(plait_project, tmp_path, monkeypatch, text, said):
    monkeypatch.chdir(tmp_path)
    name = f"own_{abs(hash(text))}"  # this process keeps what it has imported
    (tmp_path / f"{name}.py").write_text(text)
    done = plait_project("verify", f"{name}.py::it")
    assert (done.code, done.out) == (2, "")
    assert said in done.err.replace(name, "own")


NESTED = """
import torch
from plait.testing import Comparison
from mine import Model, loss, random_tokens

torch.set_on_ranks = True


def made():
    def parallelize(model, mesh):
        assert torch.set_on_ranks
        return torch.nn.parallel.DistributedDataParallel(model)

    off = dict.fromkeys(["saved", "steps", "documents", "recomputation", "frozen", "norm"], "this is short")
    batch = random_tokens(vocab=64, shifted=True)
    return Comparison(build=Model, parallelize=parallelize, batch=batch, loss=loss, mesh={"dp": 2}, off=off)
"""


def test_what_a_file_sets_holds_on_ranks(plait_project, mine):
    (mine / "nested.py").write_text(NESTED)
    done = plait_project("verify", "nested.py::made")
    assert done.code == 0, done.out + done.err


def test_the_action_runs_what_its_users_would(mine):
    action = yaml.safe_load(ACTION.read_text())
    steps = {step["name"]: step for step in action["runs"]["steps"]}
    assert action["runs"]["using"] == "composite"
    given = {name: each.get("default", "mine.py::wrong") for name, each in action["inputs"].items()}
    step = steps["Compare"]
    env = {key: value.replace("${{ inputs.", "").removesuffix(" }}") for key, value in step["env"].items()}
    assert set(env.values()) <= set(given)
    path = {"PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}"}
    bash = ["bash", "-e", "-c", step["run"]]
    ran = subprocess.run(bash, env={**os.environ, **path, **{k: given[v] for k, v in env.items()}}, check=False)
    assert ran.returncode == 1
    assert Path(steps["Show beside the code"]["with"]["sarif_file"]).exists()
    install = steps["Install"]["run"]
    assert install.startswith("python -m pip install ")


def test_the_page_says_what_a_newcomer_needs():
    """The example of transformers has ten lines at most."""
    text = next(block.text for block in blocks(PAGE) if block.file == "check.py")
    code = [line for line in text.splitlines() if line and not line.startswith("#")]
    assert 5 < len(code) <= 10, code
