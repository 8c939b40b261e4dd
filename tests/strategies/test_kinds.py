"""Every kind of plugin: found in metadata, imported only when asked for, and held against what its kind must be."""

import json
import re
import sys
from pathlib import Path

import pytest

from plait import PlaitError
from plait.contract.kinds import CLASS, KINDS
from plait.strategies import registry
from plait.strategies.hooks import Hooks
from plait.strategies.registry import everything, installed, load
from plait_testing.project import STARTED
from tests.helpers.fakes import distribution, forget

CLASSES = """
import attrs

@attrs.define
class Good:
    def factor(self, step, steps, group): ...
    def summed(self, logits, labels): ...
    def start(self, step): ...
    def open(self, run, step): ...
    def check(self): ...
    def prepare(self): ...
    def log(self, row): ...
    def close(self): ...
"""
OBJECTS = """
import plait

help = "does what it does"
def arguments(parser): parser.add_argument("--much", type=int)
def run(args): print("much", args.much)
def cannot_work(checked): return ""
def detect(env): return None
def variables(env): return {}
@plait.hookspec(firstresult=True)
def colour(run): "What a strategy is painted in."
@plait.hookspec
def shade(run): "What it is beside others."
"""
OF_CLASSES = [kind.name for kind in KINDS.values() if kind.target == CLASS]
OF_OBJECTS = [kind.name for kind in KINDS.values() if kind.target != CLASS and kind.methods]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    yield tmp_path
    forget(tmp_path)


def of_kind(folder: Path, kind: str, name: str = "mine", package: str = "plait-mine", code: str | None = None) -> None:
    """Write a distribution with one plugin of this kind."""
    in_class = kind in OF_CLASSES
    distribution(folder, package, code=(CLASSES if in_class else OBJECTS) if code is None else code)
    module = package.replace("-", "_")
    target = f"{module}:Good" if in_class else module
    api = f"[plait.api]\n{name} = v1\n" if kind == "strategy" else ""
    (folder / f"{module}-1.0.dist-info" / "entry_points.txt").write_text(
        f"[{KINDS[kind].group}]\n{name} = {target}\n{api}"
    )


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_installed_is_known_and_not_imported(folder, kind):
    of_kind(folder, kind, code="raise SystemExit('imported')")
    plugin = installed(kind)["mine"]
    assert (str(plugin), plugin.state) == (f"{kind} 'mine' (plait-mine 1.0)", "ok")
    assert "plait_mine" not in sys.modules


@pytest.mark.parametrize("kind", [*OF_CLASSES, *OF_OBJECTS])
def test_what_a_kind_must_be(folder, kind):
    of_kind(folder, kind)
    assert load("mine", kind)
    of_kind(folder, kind, "other", "plait-other", code="Good = 3\n")
    with pytest.raises(PlaitError) as caught:
        load("other", kind)
    where = "plait_other:Good" if kind in OF_CLASSES else "plait_other"
    assert str(caught.value).startswith(f"{kind} 'other' (plait-other 1.0) must be {KINDS[kind].must}, but {where} ")


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "model"])
def test_unknown_broken_and_doubled_names(folder, kind):
    of_kind(folder, kind)
    with pytest.raises(PlaitError, match=rf"{kind} 'mien' is not installed; installed: .*; did you mean 'mine'\?"):
        load("mien", kind)
    of_kind(folder, kind, "broken", "plait-broken", code="1 / 0")
    with pytest.raises(PlaitError, match=re.escape(f"{kind} 'broken' (plait-broken 1.0) cannot be imported from ")):
        load("broken", kind)
    of_kind(folder, kind, "mine", "plait-other")
    with pytest.raises(PlaitError, match="defined twice: by plait-mine and by plait-other; uninstall one"):
        load("mine", kind)


def test_fifty_packages_are_read_once_each_and_imported_never(folder, monkeypatch, plait_project):
    for number in range(50):
        kind = list(KINDS)[number % len(KINDS)]
        of_kind(folder, kind, f"many{number}", f"many-{number}", code="raise SystemExit('imported')")
    scans = []
    monkeypatch.setattr(registry, "entry_points", lambda *a, real=registry.entry_points: scans.append(a) or real(*a))
    assert sum(name.startswith("many") for of_kind in everything().values() for name in of_kind) == 50
    installed("sink"), installed("strategy"), everything()
    assert len(scans) == 1
    assert plait_project("train", "launch.device=cpu", "model.n_layers=1").code == STARTED
    assert not [name for name in sys.modules if name.startswith("many_")]


def test_a_command_of_a_package(folder, plait_project):
    of_kind(folder, "command", "paint")
    of_kind(folder, "command", "spill", "plait-spill", code=OBJECTS.replace('print("much", args.much)', "1 / 0"))
    done = plait_project("paint", "--much", "3")
    assert (done.code, done.out, done.err) == (0, "much 3\n", "")
    assert "plait paint --much" not in (helped := plait_project("--help").out)
    assert re.search(r"plait paint +from plait-mine", helped)
    assert plait_project("paint", "--mush", "3").code == 1
    done = plait_project("spill")
    why = "plait: command 'spill' (plait-spill 1.0) failed: ZeroDivisionError: division by zero\n"
    assert (done.code, done.err) == (1, why)
    of_kind(folder, "command", "train", "plait-evil")
    assert "defined twice: by plait-core and by plait-evil; uninstall one" in plait_project("train", cold=True).err


PAINTED = """
import attrs, plait

@attrs.define
class {name}:
    @plait.hookimpl(optionalhook=True)
    def colour(self, run):
        return run
"""


def test_hooks_that_a_package_specifies(folder):
    """A strategy may have them whether the package is installed or not; only one may have a first-result hook."""
    scope: dict = {}
    for name in ("Red", "Blue"):
        exec(PAINTED.format(name=name), scope)
    red, blue = scope["Red"](), scope["Blue"]()
    alone = Hooks({"red": red})
    assert alone.implemented("colour")
    with pytest.raises(AttributeError):
        Hooks({}).first("colour", run=1)
    of_kind(folder, "hookspecs")
    assert Hooks({}).first("colour", run=1) is None
    hooks = Hooks({"red": red})
    assert (hooks.first("colour", run=7), hooks.owners("colour")) == (7, ["red"])
    with pytest.raises(PlaitError, match="'blue' and 'red' both implement 'colour'; only one may"):
        Hooks({"blue": blue, "red": red})
    wrapper = PAINTED.replace("optionalhook", "wrapper=True, optionalhook").replace("return run", "return 2 * (yield)")
    exec(wrapper.format(name="Twice") + wrapper.format(name="Shade").replace("colour", "shade"), scope)
    assert Hooks({"red": red, "twice": scope["Twice"]()}).first("colour", run=7) == 14
    with pytest.raises(PlaitError, match="strategy 'shade' wraps the hook 'shade', which each strategy answers"):
        Hooks({"shade": scope["Shade"]()})
    distribution(folder, "plait-typo", {"typo": "Typo"}, code=PAINTED.format(name="Typo").replace("colour", "color"))
    assert json.loads(json.dumps(sorted(installed("hookspecs")))) == ["mine"]


def test_a_module_that_specifies_no_hook(folder):
    of_kind(folder, "hookspecs", code="def colour(run): ...\n")
    with pytest.raises(PlaitError, match=r"hookspecs 'mine' \(plait-mine 1.0\) must be a module with functions @plait"):
        Hooks({}).first("colour", run=1)


def test_a_module_that_specifies_a_hook_of_plaits(folder):
    code = "import plait\n\n@plait.hookspec\ndef after_step(step): ...\n"
    of_kind(folder, "hookspecs", code=code)
    with pytest.raises(
        PlaitError, match=r"hookspecs 'mine' \(plait-mine 1.0\) specifies 'after_step', which is a hook"
    ):
        Hooks({}).first("colour", run=1)


@pytest.mark.slow
def test_a_pruner_of_a_package_is_asked_beside_the_plan(folder, plait_project):
    reason = '"too green" if checked.config.train.seed == 7 else ""'
    of_kind(folder, "pruner", "taste", code=OBJECTS.replace('return ""', f"return {reason}"))
    command = ("train", "-m", "train.seed=7", "sweep.prune=true", "launch.device=cpu", "model.n_layers=1")
    done = plait_project(*command)
    assert (done.code, done.err) == (0, "")
    assert "is pruned: too green" in done.out
    of_kind(folder, "pruner", "mute", "plait-mute", code=OBJECTS.replace('return ""', "return None"))
    assert "pruner 'mute' (plait-mute 1.0) answered None" in plait_project(*command).err
