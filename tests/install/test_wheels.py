"""Wheels in an environment that holds nothing else of Plait: what a user gets by pip, and what a stranger can add."""

import json
import re
import zipfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from plait_testing.parity import unequal
from tests.helpers.commands import SMALL, rows
from tests.install.environments import EXAMPLES, PLUGINS, ROOT, clean_environment

DOUBLE = ("precision.storage=float64", "precision.param=float64", "precision.reduce=float64")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def clean(wheels, tmp_path_factory):
    names = [f"plait-{project.name.replace('_', '-')}" for project in PLUGINS]
    return clean_environment(tmp_path_factory.mktemp("clean") / "venv", wheels, "plait", *names, "plait-twin")


@pytest.fixture
def empty(tmp_path):
    folder = tmp_path / "empty"
    folder.mkdir()
    return folder


def test_what_is_in_them(wheels):
    (core,) = wheels.glob("plait_core-[0-9]*.whl")
    names = set(zipfile.ZipFile(core).namelist())
    assert {"plait/conf/train.yaml", "plait/conf/optimizer/adamw.yaml", "plait/conf/model/__init__.py"} <= names
    assert {"plait/py.typed", "plait/commands/main.py", "hydra_plugins/plait_searchpath.py"} <= names
    assert "hydra_plugins/__init__.py" not in names
    (models,) = wheels.glob("plait_models-*.whl")
    assert "plait_models/conf/model/llama3_8b.yaml" in zipfile.ZipFile(models).namelist()
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert not [name for name in names if name.startswith(("tests", "plugins", "conf/"))]
    for wheel in wheels.glob("plait_*.whl"):
        inside = zipfile.ZipFile(wheel).namelist()
        plugins = next(name for name in inside if name.endswith("entry_points.txt"))
        assert any(name.endswith("licenses/LICENSE") for name in inside) or wheel.name.startswith("plait_twin"), wheel
        assert "[plait." in zipfile.ZipFile(wheel).read(plugins).decode(), wheel
        assert any(name.endswith("/py.typed") for name in inside) or wheel.name.startswith("plait_twin"), wheel
    assert len(list(wheels.glob("*.whl"))) == len(list(wheels.glob("*.tar.gz"))) == 3 + len(PLUGINS) + len(EXAMPLES)


def test_the_core_and_one_strategy_alone(wheels, tmp_path):
    """No package that `pip install plait` brings is needed to train a stranger's model on a stranger's source."""
    clean = clean_environment(tmp_path / "venv", wheels, "plait-core", "plait-fsdp2", "plait-gpt2", "plait-sums")
    commands = re.findall(r"^  plait (\w+) ", clean.run("plait", "--help", cwd=tmp_path).stdout, re.MULTILINE)
    assert {"inspect", "plugins", "train"} <= set(commands)
    assert not {"calibrate", "compare", "convert", "new", "plan", "report", "verify"} & set(commands)
    small = ("model.dim=32", "model.n_layers=2", "model.n_heads=4", *(o for o in SMALL if not o.startswith("model.")))
    options = ("strategy=[fsdp2]", "model=gpt2_debug", *small, "train.steps=2", "metrics.tensorboard=null")
    clean.train(*options, "data=sums", "run.name=a", cwd=tmp_path)
    assert len(rows(tmp_path / "runs/a")) == 2
    assert not (tmp_path / "runs/a/tensorboard").exists()
    for data in ((), ("data=text", "data.path=a.txt")):  # the default, and one that is asked for
        name = "text" if data else "stdlib"
        said = f"data={name} is in plait-data, which is not installed: pip install plait-data; installed: sums\n"
        assert clean.run("plait", "train", *options, *data, cwd=tmp_path, code=1).stderr == f"plait: {said}"
    said = clean.run("plait", "train", "data=sums", cwd=tmp_path, code=1).stderr
    absent = "model=llama3_debug is in plait-models, which is not installed: pip install plait-models"
    assert said == f"plait: {absent}; installed: gpt2, gpt2_debug\n"
    for needs_no_data, says in ((("--help",), "train.steps"), (("--cfg", "job"), "train:")):
        assert says in clean.run("plait", "train", *needs_no_data, cwd=tmp_path).stdout
    clean.install("--find-links", wheels, "plait-data")
    clean.train(*options, "run.name=b", cwd=tmp_path)
    assert len(rows(tmp_path / "runs/b")) == 2
    clean.run("python", "-m", "pip", "uninstall", "--yes", "--quiet", "plait-fsdp2", cwd=tmp_path)
    clean.train("model=gpt2_debug", *small, "strategy=[]", "observer=[]", "train.steps=1", "run.name=c", cwd=tmp_path)
    said = clean.run("plait", "train", *options, cwd=tmp_path, code=1).stderr
    assert said == "plait: strategy=fsdp2 is not installed; installed: none\n"
    clean.install("--find-links", wheels, "plait-fsdp2")
    plan = ("plait", "plan", "--json", *options, "world=4", "cluster=h100")
    said = clean.run(*plan, cwd=tmp_path, code=1).stderr
    assert said == "plait: plait plan is in plait-plan, which is not installed: pip install plait-plan\n"
    clean.install("--find-links", wheels, "plait-plan")
    assert json.loads(clean.run(*plan, cwd=tmp_path).stdout)["fits"] is True


ORIGINS = """
import json, sys
from importlib import import_module
from importlib.metadata import entry_points
from plait.strategies.registry import load
modules = {"plait", "hydra_plugins.plait_searchpath"}
for entry in entry_points(group="plait.strategies"):
    load(entry.name)
    modules.add(entry.module)
import plait.train.trainer
print(json.dumps({name: import_module(name).__file__ for name in modules} | {"others": [
    m.__file__ for m in list(sys.modules.values()) if getattr(m, "__file__", None)
], "path": sys.path}))
"""


def test_everything_comes_from_there(clean, empty):
    found = json.loads(clean.run("python", "-c", ORIGINS, cwd=empty).stdout)
    others, path = found.pop("others"), found.pop("path")
    assert {"plait", "plait_fsdp2", "plait_twin"} <= found.keys()
    (site,) = clean.folder.glob("lib/python*/site-packages")
    for name, file in found.items():
        assert Path(file).is_relative_to(site), f"{name} is {file}"
    for file in (*others, *path):
        assert not Path(file).is_relative_to(ROOT), file


def test_plugins_are_found_and_sound(clean, empty):
    found = json.loads(clean.run("plait", "plugins", "--check", "--json", cwd=empty).stdout)
    states = {(each["distribution"], each["state"]) for each in found}
    assert {("plait-fsdp2", "ok"), ("plait-twin", "ok")} <= states
    assert {state for _, state in states} == {"ok"}


def test_a_run_from_an_empty_folder(clean, empty):
    clean.train("strategy=[fsdp2]", *SMALL, "train.steps=6", "run.name=a", cwd=empty)
    assert [r["step"] for r in rows(empty / "runs/a")] == list(range(1, 7))
    assert (empty / "runs/a/export/model.safetensors").exists()
    versions = json.loads((empty / "runs/a/versions.json").read_text())
    assert {"plait", "plait-fsdp2", "torch"} <= versions.keys()


def test_a_model_of_the_users_own_folder(clean, empty):
    """By ./conf in a sweep, and by --config-dir; both under fsdp2, in ranks that must find it too."""
    (empty / "mine.py").write_text(
        "from plait_models.llama3 import Llama3\n\n\nclass Mine(Llama3):\n"
        "    def forward(self, tokens, positions=None):\n        return 2 * super().forward(tokens, positions)\n"
    )
    for folder, name in (("conf", "mine"), ("elsewhere", "other")):
        (empty / folder / "model").mkdir(parents=True)
        (empty / folder / "model" / f"{name}.yaml").write_text("defaults: [llama3_debug]\n_target_: mine.Mine\n")
    short = (*SMALL, "train.steps=3", "validation.interval=0", "checkpoint.enabled=false")
    clean.train("-m", "model=mine", "train.seed=1,2", "strategy=[fsdp2]", "hydra.sweep.dir=sweep", *short, cwd=empty)
    clean.train("--config-dir", "elsewhere", "model=other", "strategy=[fsdp2]", "train.seed=2", *short, cwd=empty)
    found = [rows(empty / run) for run in ("sweep/0", "sweep/1", "runs/other-fsdp2")]
    assert [len(each) for each in found] == [3, 3, 3]
    assert [r["loss"] for r in found[1]] == [r["loss"] for r in found[2]]
    assert [r["loss"] for r in found[0]] != [r["loss"] for r in found[1]]


def test_a_stranger_trains_by_the_command(clean, empty):
    """In float64: 2 ranks under twin, and one process that sees the same batches."""
    options = (*SMALL, *DOUBLE, "train.steps=20", "checkpoint.enabled=false")
    said = clean.train("strategy=[twin]", *options, cwd=empty)
    assert "launch: local, 2 rank(s) here of 2; twin=2" in said
    clean.train("strategy=[]", "train.global_batch_size=4", *options, cwd=empty)
    twin, one = rows(empty / "runs/llama3_debug-twin"), rows(empty / "runs/llama3_debug")
    assert [r["tokens"] for r in twin] == [r["tokens"] for r in one]
    for key in ("loss", "grad_norm"):
        assert max(abs(a[key] - b[key]) for a, b in zip(twin, one, strict=True)) < 1e-9


def test_a_checkpoint_of_a_stranger_loads_under_fsdp2(clean, empty):
    options = (*SMALL, *DOUBLE, "checkpoint.interval=4", "schedule.decay_steps=0", "validation.interval=0")
    clean.train("strategy=[twin]", *options, "run.name=a", "train.steps=4", cwd=empty)
    load = f"checkpoint.load={empty}/runs/a/checkpoints/step-4"
    said = clean.train("strategy=[fsdp2]", *options, "run.name=b", "train.steps=4", load, cwd=empty)
    assert "checkpoint: resuming after step 4" in said
    saved, loaded = (load_file(empty / "runs" / name / "export/model.safetensors") for name in "ab")
    assert saved["output.weight"].dtype == torch.float64
    assert unequal(saved, loaded) is None
    clean.train("strategy=[twin]", *options, "run.name=a", "train.steps=8", cwd=empty)
    clean.train("strategy=[fsdp2]", *options, "run.name=c", "train.steps=8", load, cwd=empty)
    after, elsewhere = rows(empty / "runs/a")[4:], rows(empty / "runs/c")
    assert [r["step"] for r in elsewhere] == [5, 6, 7, 8]
    for key in ("loss", "grad_norm"):
        assert max(abs(a[key] - b[key]) for a, b in zip(after, elsewhere, strict=True)) < 1e-9
