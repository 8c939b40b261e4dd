"""The command line: what it answers without starting a rank, and what it does without importing torch."""

import json
import os
import re
import subprocess
import sys
from importlib.metadata import version

import pytest
import yaml

from plait.contract.kinds import KINDS
from plait.strategies.registry import installed
from tests.helpers.commands import environment
from tests.helpers.fakes import STRATEGY, distribution, forget

pytestmark = pytest.mark.usefixtures("plait_project")
COMMANDS = list(installed("command"))


@pytest.fixture
def strategies(tmp_path_factory, monkeypatch):
    """A folder of distributions that this process sees, and those that it starts."""
    folder = tmp_path_factory.mktemp("strategies")
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setenv("PYTHONPATH", str(folder))
    yield folder
    forget(folder)


def test_version(plait_project):
    assert plait_project("--version").out == f"plait {version('plait')}\n"


def test_help_names_every_command(plait_project):
    helped = plait_project("--help")
    assert helped.code == 0
    assert [line.split()[1] for line in helped.out.splitlines()[1:]] == [*COMMANDS, "--version"]
    nothing = plait_project()
    assert (nothing.code, nothing.out) == (1, helped.out)


def test_an_unknown_command(plait_project):
    done = plait_project("trian")
    assert (done.code, done.out) == (1, "")
    assert done.err == f"plait: unknown command 'trian'; available: {', '.join(COMMANDS)}; did you mean 'train'?\n"


@pytest.mark.parametrize("command", [command for command in COMMANDS if command != "train"])
def test_every_command_explains_itself(plait_project, command):
    done = plait_project(command, "--help")
    assert done.code == 0
    assert done.out.startswith(f"usage: plait {command} ")
    assert plait_project(command, "model=mine", "--help").out == done.out


def row(text, name):
    (line,) = (line for line in text.splitlines() if line.startswith(f"{name} "))
    return re.split(r"\s{2,}", line)


def test_plugins_from_metadata(plait_project, strategies):
    distribution(strategies, "plait-old", api=None, code="raise SystemExit('imported')")
    done = plait_project("plugins")
    assert done.code == 0
    assert row(done.out, "name") == ["name", "kind", "distribution", "version", "api", "state"]
    assert row(done.out, "fsdp2") == ["fsdp2", "strategy", "plait-fsdp2", version("plait-fsdp2"), "1", "ok"]
    assert row(done.out, "ghost")[:5] == ["ghost", "strategy", "plait-old", "1.0", "-"]
    assert row(done.out, "ghost")[5].startswith("declares no hook API")
    listed = json.loads(plait_project("plugins", "--json").out)
    assert {
        "name": "fsdp2",
        "kind": "strategy",
        "distribution": "plait-fsdp2",
        "version": version("plait-fsdp2"),
        "api": 1,
        "state": "ok",
    } in listed
    kinds = list(KINDS)
    assert listed == sorted(listed, key=lambda each: (kinds.index(each["kind"]), each["name"]))
    assert {"strategy", "model", "command"} <= {each["kind"] for each in listed}
    only = json.loads(plait_project("plugins", "--json", "--kind", "model").out)
    assert only == [each for each in listed if each["kind"] == "model"]


def test_plugins_disabled(plait_project, monkeypatch):
    monkeypatch.setenv("PLAIT_DISABLE_PLUGINS", "fsdp2")
    assert row(plait_project("plugins").out, "fsdp2")[-1] == "disabled by PLAIT_DISABLE_PLUGINS"
    done = plait_project("train", "strategy=[fsdp2]")
    assert (done.code, len(done.out.splitlines())) == (1, 1)
    assert "strategy 'fsdp2' (plait-fsdp2 " in done.err
    assert "cannot be used: disabled by PLAIT_DISABLE_PLUGINS" in done.err
    monkeypatch.setenv("PLAIT_DISABLE_PLUGINS", "fsdp")
    done = plait_project("plugins")
    assert done.err == "plait: PLAIT_DISABLE_PLUGINS names 'fsdp', which is not installed; did you mean 'fsdp2'?\n"


BROKEN = {  # distribution -> its code, the end of what is told of it
    "plait-ghost": (STRATEGY, "ok"),
    "plait-must": (STRATEGY.replace("degree: int = 1", "degree: int"), "ok"),
    "plait-missing": ("import nowhere", "plait_missing:Ghost: ModuleNotFoundError: No module named 'nowhere'"),
    "plait-deadly": ("import os\nos._exit(7)", "the interpreter that imported it died: exit code 7"),
    "plait-hooks": (STRATEGY.replace("build_mesh", "build_mseh"), "'build_mseh'"),
    "plait-stage": (STRATEGY + "    phase = 'late'\n", "has the unknown phase 'late'; available: model, stages, graph"),
    "plait-heavy": ("import torch\n" + STRATEGY, "imports torch when it is imported: move that into the methods"),
}


@pytest.mark.slow
def test_plugins_checked_one_by_one(plait_project, strategies, tmp_path_factory, monkeypatch):
    """Every broken one is told apart, and harms no other."""
    sound = set(installed("strategy"))
    for name, (code, _) in BROKEN.items():
        distribution(strategies, name, {name.removeprefix("plait-"): "Ghost"}, code=code)
    light = tmp_path_factory.mktemp("light")  # a torch that costs nothing
    (light / "torch.py").touch()
    monkeypatch.setenv("PYTHONPATH", f"{light}{os.pathsep}{strategies}")
    done = plait_project("plugins", "--check", "--json")
    assert done.code == 1
    found = {each["name"]: each for each in json.loads(done.out)}
    assert found["fsdp2"]["phase"] == "runtime"
    assert found["fsdp2"]["claims"] == ["gradient_sum", "parameter_sharding"]
    assert found["fsdp2"]["hooks"] == ["build_mesh", "choices", "parallelize"]
    states = {name: each["state"] for name, each in found.items()}
    assert {states[name] for name in sound} == {"ok"}
    for name, (_, why) in BROKEN.items():
        assert why in states[name.removeprefix("plait-")]


def test_inspect(plait_project):
    done = plait_project(
        "inspect", "strategy=[fsdp2]", "strategy.fsdp2.replicate=2", "world=8", "model.n_layers=1", "launch.device=cpu"
    )
    assert (done.code, done.err) == (0, "")
    assert "ranks     8 on cpu" in done.out
    assert "batch     64 samples of 256 tokens: 8 data ranks x 1 x 8" in done.out
    assert "  1. strategy 'fsdp2' (plait-fsdp2 " in done.out
    axes = [line.split()[1:3] for line in done.out.splitlines() if line.startswith("  dense")]
    assert axes == [["dp_replicate", "2"], ["dp_shard", "4"]]
    assert row(done.out, "layers.0.attention.wk.weight")[1:] == [
        "(kv_heads, embed)",
        "128x256",
        "dp_replicate: R, dp_shard: S(0)",
        f"{128 * 256 * 4 // 4:,}",
    ]
    whole = 4 * (2 * 272 * 256 + 256 + 2 * 256 + 2 * 256 * 256 + 2 * 128 * 256 + 3 * 640 * 256)
    assert f"parameters: {whole:,} bytes in all, {whole // 4:,} on rank 0" in done.out
    assert "optimizer torch.optim.AdamW: lr 0.003, " in done.out
    assert "  3 of 12 parameters, norms and biases: weight_decay 0.0\n" in done.out
    assert not os.listdir()


def test_inspect_shows_equal_blocks_once(plait_project):
    done = plait_project("inspect", "model=deepseek_v3_debug", "launch.device=cpu")
    names = [line.split()[0] for line in done.out.splitlines() if line]
    assert "layers.1 to layers.3, each" in done.out
    assert names.count("attention.wq_b.weight") == names.count("layers.0.attention.wq_b.weight") == 1
    assert not [name for name in names if name.startswith(("layers.2.", "layers.3."))]
    assert row(done.out, "  feed_forward.router.weight")[2:] == ["(None, embed)", "8x256", "-", "8,192"]


def test_inspect_without_strategies(plait_project):
    done = plait_project("inspect", "model.n_layers=1", "launch.device=cpu")
    assert done.code == 0
    assert "  none" in done.out
    assert "  one rank, no axes" in done.out
    assert row(done.out, "norm.weight")[1:] == ["(embed)", "256", "-", "1,024"]


def test_inspect_shows_how_a_model_derived_its_spec(plait_project, monkeypatch):
    from plait_models.llama3 import Llama3

    monkeypatch.setattr(Llama3, "derived", lambda self: {"layers.*": "blocks: seen"}, raising=False)
    lines = plait_project("inspect", "model.n_layers=1", "launch.device=cpu").out.splitlines()
    assert lines[-2:] == ["how the spec was derived", "  layers.*: blocks: seen"]
    monkeypatch.undo()
    assert "derived" not in plait_project("inspect", "model.n_layers=1", "launch.device=cpu").out


def test_hydra_shows_the_job(plait_project):
    done = plait_project("train", "--cfg", "job", "strategy=[fsdp2]", "train.steps=3")
    assert done.code == 0
    shown = yaml.safe_load(done.out)
    assert shown["strategy"]["fsdp2"]["shard"] == -1
    assert shown["train"]["steps"] == 3
    assert yaml.safe_load(plait_project("train", "--cfg", "job").out)["strategy"] == {}
    assert plait_project("train", "--cfg", "job", "--package", "run").out.split() == [
        "#",
        "@package",
        "run",
        "name:",
        "null",
    ]


def test_only_selected_plugins_are_imported(plait_project, strategies):
    distribution(strategies, "plait-loud", {"loud": "Ghost"}, code="raise SystemExit('imported')")
    assert "loud" in yaml.safe_load(plait_project("train", "--cfg", "job", "strategy=[loud]").out)["strategy"]
    assert plait_project("inspect", "launch.device=cpu", "model.n_layers=1").code == 0


def test_hydra_finds_conf_of_packages_and_of_the_folder(plait_project, tmp_path):
    (tmp_path / "conf" / "model").mkdir(parents=True)
    (tmp_path / "conf" / "model" / "mine.yaml").write_text("_target_: mine.Model\n")
    (tmp_path / "extra" / "data").mkdir(parents=True)
    (tmp_path / "extra" / "data" / "other.yaml").write_text("_target_: other.Data\n")
    done = plait_project("train", "--info", "searchpath", "--config-dir", "extra")
    for path in ("pkg://plait.conf", "/plait_fsdp2/conf", f"file://{tmp_path}/conf", f"file://{tmp_path}/extra"):
        assert path in done.out
    shown = yaml.safe_load(
        plait_project("train", "--cfg", "job", "--config-dir", "extra", "model=mine", "data=other").out
    )
    assert (shown["model"], shown["data"]) == ({"_target_": "mine.Model"}, {"_target_": "other.Data"})


@pytest.mark.parametrize(
    "arguments",
    [("--info",), *(pytest.param(a, marks=pytest.mark.slow) for a in (("-m", "--help"), ("--hydra-help",)))],
)
def test_hydra_explains_itself(plait_project, arguments):
    done = plait_project("train", *arguments)
    assert (done.code, done.err) == (0, "")
    assert ("--multirun" in done.out) if "--hydra-help" in arguments else ("llama3_debug" in done.out)


COMPLETED = {
    "plait ": list(COMMANDS),
    "plait tr": ["train"],
    "plait train model=llama3_7": ["model=llama3_70b"],
    "plait train strategy=fs": ["strategy=fsdp2"],
    "plait inspect train.ste": ["train.steps="],
    "plait train strategy=fsdp2 strategy.fsdp2.sh": ["strategy.fsdp2.shard="],
}


def test_the_shell_completes(plait_project, monkeypatch):
    assert "complete -o nospace -o default -F hydra_bash_completion plait\n" in plait_project("-sc", "install=bash").out
    for line, words in COMPLETED.items():
        monkeypatch.setenv("COMP_LINE", line)
        done = plait_project("-sc", "query=bash")
        assert (done.code, done.err, done.out.split()) == (0, "", words), line


WITHOUT_TORCH = """
import os, sys

class Guard:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torch":
            print(f"{now} imports torch", file=sys.stderr, flush=True)
            os._exit(1)

sys.meta_path.insert(0, Guard())
now = "import plait"
import plait
from plait.commands.main import main
for now in sys.argv[1:]:
    sys.argv = ["plait", *now.split()]
    try:
        main()
    except SystemExit as end:
        assert not end.code, (now, end.code)
"""


def test_what_needs_no_torch(tmp_path):
    commands = ["--help", "--version", "plugins", "plugins --json", "train --cfg job strategy=[fsdp2]"]
    commands += ["train --help", "train --info", "-sc install=bash"]
    commands += [f"{command} --help" for command in ("inspect", "verify", "convert")]
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, *commands],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert not os.listdir()


def test_a_wrong_key_is_answered_without_torch(tmp_path):
    commands = [f"{command} train.step=3" for command in ("train", "inspect", "data", "plan", "verify")]
    program = WITHOUT_TORCH.replace("not end.code", "end.code == 1")
    done = subprocess.run(
        [sys.executable, "-c", program, *commands], cwd=tmp_path, env=environment(), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    said = done.stderr.splitlines()
    assert [line.startswith("plait: unknown key train.step; ") for line in said] == [True] * len(commands), said


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("os._exit(0)", "os._exit(0) was called"),
        ("os._exit(3)", "os._exit(3) was called"),
        ("sys.exit(0)", "sys.exit(0) was called"),
        ("sys.exit('bye')", "sys.exit('bye') was called"),
        ("exec('raise KeyboardInterrupt')", "KeyboardInterrupt was raised"),
    ],
)
def test_code_that_ends_the_command_is_named(code, said):
    """Code of a model or a plugin; the command would end without a word, or even with success."""
    program = f"import os, sys\nfrom plait.commands import main\nmain._command = lambda _: {code}\nmain.main()"
    done = subprocess.run([sys.executable, "-c", program], env=environment(), capture_output=True, text=True)
    assert (done.returncode, done.stderr.partition(" in <")[0]) == (1, f"plait: {said}")
    assert done.stderr.endswith(" (<string>, line 3)\n") or "exec" in code
