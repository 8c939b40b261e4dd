"""Strategies of others that are broken: each is named with its distribution, in one sentence, before a rank starts."""

import re

import pytest

from plait.records.run_folder import RunFolder
from plait_testing.project import STARTED
from tests.helpers.fakes import STRATEGY, distribution, forget

BAD = r"strategy 'ghost' \(plait-bad 1\.0\)"
HINT = "PLAIT_TRACE_PLUGINS=1 shows where"


@pytest.fixture
def strategies(plait_project, tmp_path_factory, monkeypatch):
    folder = tmp_path_factory.mktemp("strategies")
    monkeypatch.syspath_prepend(str(folder))
    yield folder
    forget(folder)


def hook(name, body="pass"):
    return f"{STRATEGY}\n    @hookimpl\n    def {name}:\n        {body}\n"


def refused(plait_project, sentence, selected="ghost", command="train"):
    done = plait_project(command, f"strategy=[{selected}]", "launch.device=cpu")
    assert done.code == 1
    assert re.fullmatch(f"plait: {sentence}\n", done.err), done.err


CODES = {
    "import": ("import nowhere", rf"{BAD} cannot be imported from plait_bad:Ghost: ModuleNotFoundError: .*'nowhere'"),
    "class": ("Ghost = dict", rf"{BAD} must be an attrs class, .*"),
    "hook": (hook("clip_grad(self)"), rf"{BAD} does not fit the hooks of API 1: .*'clip_grad'.*"),
    "argument": (hook("after_step(self, setp)"), rf"{BAD} does not fit the hooks of API 1: .*'after_step'.*\bsetp\b.*"),
    "no mark": (
        f"{STRATEGY}\n    def after_step(self):\n        pass\n",
        rf"{BAD} has a method 'after_step', the name of a hook, without @plait\.hookimpl, .*",
    ),
    "None": (hook("build_mesh(self)"), rf"{BAD} returned None from its hook 'build_mesh', which must return a list .*"),
    "exception": (
        hook("build_mesh(self)", "return 1 / 0"),
        rf"ZeroDivisionError: division by zero \(raised by {BAD} in its hook 'build_mesh'\); {HINT}",
    ),
    "its own sentence": (
        "from plait import PlaitError\n" + hook("configure(self)", "raise PlaitError('strategy.ghost.x=1 is odd')"),
        rf"strategy\.ghost\.x=1 is odd \(raised by {BAD} in its hook 'configure'\)",
    ),
    "nobody sums": (
        STRATEGY.replace("self.degree)", "2, splits='batch')"),
        r"the axes ghost=2 \(ghost\) split the tokens, but no selected strategy sums the gradients .*",
    ),
}


@pytest.mark.parametrize(("code", "sentence"), CODES.values(), ids=CODES)
def test_a_plugin_that_fails_is_named(plait_project, strategies, code, sentence):
    distribution(strategies, "plait-bad", code=code)
    refused(plait_project, sentence)


def test_what_a_plugin_keeps_for_itself_is_no_option(plait_project, strategies):
    kept = "    _model: object = attrs.field(init=False)\n    norms: list = attrs.field(init=False, factory=list)\n"
    distribution(strategies, "plait-bad", code=STRATEGY.replace("    @hookimpl", kept + "\n    @hookimpl"))
    overrides = ("strategy=[ghost]", "launch.device=cpu", "launch.nproc_per_node=1", "run.name=a")
    assert plait_project("train", *overrides).code == STARTED
    assert RunFolder("runs/a").read_config()["strategy"] == {"ghost": {"degree": 1}}


def test_a_plugin_that_fails_in_parallelize(plait_project, strategies):
    distribution(strategies, "plait-bad", code=hook("parallelize(self)", "raise ValueError"))
    refused(plait_project, rf"ValueError \(raised by {BAD} in its hook 'parallelize'\); {HINT}", command="inspect")


def test_a_plugin_without_options_file(plait_project, strategies):
    distribution(strategies, "plait-bad")
    (strategies / "plait_bad/conf/strategy/ghost.yaml").unlink()
    refused(plait_project, f"{BAD} has no conf/strategy/ghost.yaml in its package plait_bad")


def test_two_plugins_of_one_name(plait_project, strategies):
    for name in ("plait-one", "plait-two"):
        distribution(strategies, name)
    refused(plait_project, r"strategy=ghost is defined twice: by plait-one \(.*\) and by plait-two \(.*\); .*")
    assert plait_project("train", "strategy=[fsdp2]", "launch.device=cpu").code == STARTED


@pytest.mark.parametrize(("api", "why"), [("v2", "written for hook API 2; .*"), (None, "declares no hook API: .*")])
def test_a_plugin_for_another_hook_api(plait_project, strategies, api, why):
    distribution(strategies, "plait-bad", api=api)
    refused(plait_project, f"{BAD} cannot be used: {why}")


def test_two_claims_of_one_role(plait_project, strategies):
    distribution(strategies, "plait-bad", code=STRATEGY + "    claims = ('parameter_sharding',)\n")
    sentence = r"strategies 'ghost' and 'fsdp2' both claim the role 'parameter_sharding', .*"
    refused(plait_project, sentence, "ghost,fsdp2")
