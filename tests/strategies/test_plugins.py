"""Installed strategies: found in metadata alone, and whose fault it is when one of them does not work."""

import re
import sys

import attrs
import pytest
from torch import nn

from plait import ModelSpec, PlaitError
from plait.contract.config import Config
from plait.contract.errors import near_miss
from plait.contract.run import Run
from plait.parallel.assembly import Assembly
from plait.strategies.hooks import Hooks
from plait.strategies.registry import create, described, installed, load, name_of
from plait.testing import raises_about
from tests.helpers.fakes import STRATEGY, distribution, forget


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Where distributions are written; a good one of the strategy `fine` is there already."""
    monkeypatch.syspath_prepend(str(tmp_path))
    distribution(tmp_path, "plait-fine", {"fine": "Ghost"}, version="2.1")
    yield tmp_path
    forget(tmp_path)


def refused(sentence, act, *arguments):
    with pytest.raises(PlaitError, match=re.escape(sentence)) as caught:
        act(*arguments)
    assert "\n" not in str(caught.value)
    assert type(create("fine", {})).__name__ == "Ghost"  # one that is broken harms no other


def test_metadata_says_it_all(folder):
    distribution(folder, "plait-loud", {"loud": "Loud"}, code="raise SystemExit('imported')")
    found = installed()
    assert attrs.asdict(found["fine"]) == {
        "name": "fine",
        "target": "plait_fine:Ghost",
        "distribution": "plait-fine",
        "version": "2.1",
        "api": 1,
        "state": "ok",
        "kind": "strategy",
    }
    assert found["loud"].state == "ok"
    assert str(found["loud"]) == "strategy 'loud' (plait-loud 1.0)"
    assert list(found) == sorted(found)
    assert not {"plait_fine", "plait_loud"} & set(sys.modules)


def test_an_unknown_name_lists_what_is_there(folder):
    with raises_about("strategy", "fien", ("fine",)) as caught:
        load("fien")
    assert str(caught.value).endswith(near_miss("fien", ["fine"]))
    with raises_about("strategy", "xyz", ("fine",)) as caught:
        load("xyz")
    assert ";" not in str(caught.value).partition("; ")[2]


def test_two_of_one_name(folder):
    for name in ("ghost-b", "ghost-a"):
        distribution(folder, name)
    twice = "defined twice: by ghost-a and by ghost-b; uninstall one"
    refused(f"strategy 'ghost' (ghost-b 1.0) cannot be used: {twice}", load, "ghost")


def test_two_of_one_name_are_told_in_the_order_of_their_distributions(folder):
    for name, target in (("ghost-a", "z_module"), ("ghost-b", "a_module")):
        distribution(folder, name)
        (folder / f"{name.replace('-', '_')}-1.0.dist-info" / "entry_points.txt").write_text(
            f"[plait.strategies]\nghost = {target}:Ghost\n"
        )
    assert installed()["ghost"].state == "defined twice: by ghost-a and by ghost-b; uninstall one"


def test_one_distribution_seen_twice_is_one(folder, tmp_path_factory, monkeypatch):
    again = tmp_path_factory.mktemp("again")
    distribution(again, "plait-fine", {"fine": "Ghost"}, version="2.1")
    monkeypatch.syspath_prepend(str(again))
    assert installed()["fine"].state == "ok"


def test_the_api_of_another_distribution_does_not_count(folder):
    distribution(folder, "plait-old", api=None)
    distribution(folder, "plait-late", {"late": "Ghost"})
    entries = folder / "plait_late-1.0.dist-info" / "entry_points.txt"
    entries.write_text(entries.read_text() + "ghost = v1\n")
    refused("strategy 'ghost' (plait-old 1.0) cannot be used: declares no hook API", load, "ghost")


def test_blocked_by_the_environment(folder, monkeypatch):
    distribution(folder, "plait-ghost")
    monkeypatch.setenv("PLAIT_DISABLE_PLUGINS", "other, ghost")
    refused("strategy 'ghost' (plait-ghost 1.0) cannot be used: disabled by PLAIT_DISABLE_PLUGINS", load, "ghost")


NO_API = "cannot be used: declares no hook API: add ghost = \"v1\" to the entry points 'plait.api'"
IMPORT = "cannot be imported from plait_bad:Ghost: "


@pytest.mark.parametrize(
    ("made", "says"),
    [
        ({"api": None}, NO_API),
        ({"api": "one"}, NO_API),
        ({"api": "v2"}, "cannot be used: written for hook API 2; this Plait runs 1 to 1"),
        ({"code": "import nowhere"}, f"{IMPORT}ModuleNotFoundError: No module named 'nowhere'"),
        ({"code": "def broken(:"}, f"{IMPORT}SyntaxError: "),
        ({"code": "1 / 0"}, f"{IMPORT}ZeroDivisionError: division by zero"),
        ({"code": "Gohst = 1"}, f"{IMPORT}AttributeError: module 'plait_bad' has no attribute 'Ghost'"),
        *(
            ({"code": code}, "must be an attrs class, whose fields are its options, but plait_bad:Ghost is ")
            for code in ("class Ghost: pass", "def Ghost(): pass", "Ghost = 3")
        ),
    ],
)
def test_what_cannot_be_loaded(folder, made, says):
    distribution(folder, "plait-bad", version="7.0rc1", **made)
    refused(f"strategy 'ghost' (plait-bad 7.0rc1) {says}", load, "ghost")


def test_a_class_inside_another(folder):
    code = STRATEGY + "\nclass Outer:\n    Ghost = Ghost\n"
    distribution(folder, "plait-nested", {"ghost": "Outer.Ghost"}, code=code)
    assert load("ghost").__name__ == "Ghost"


def test_options(folder):
    assert create("fine", {"degree": 3}).degree == 3
    one, another = create("fine", {}), create("fine", {})
    assert one is not another
    refused("unknown key strategy.fine.dgree; available: degree; did you mean 'degree'?", create, "fine", {"dgree": 3})
    refused("strategy.fine.degree is 'two'; it must be a whole number", create, "fine", {"degree": "two"})


def test_a_constructor_that_exits_is_named(folder):
    """Else `sys.exit(0)` there ends the command as if it had trained."""
    code = STRATEGY + "\n    def __attrs_post_init__(self):\n        raise SystemExit(0)\n"
    distribution(folder, "plait-bad", code=code)
    said = "strategy 'ghost' (plait-bad 1.0) cannot be created from its options: it calls sys.exit(0)"
    refused(said, create, "ghost", {})


def test_an_instance_is_known_by_its_entry_point(folder):
    assert name_of(create("fine", {})) == "fine"

    @attrs.define
    class Stray:
        pass

    @attrs.define
    class Named(Stray):
        name = "other"

    assert (name_of(Stray()), name_of(Named())) == ("stray", "other")
    assert described("fine") == "strategy 'fine' (plait-fine 2.1)"
    assert described("stray") == "strategy 'stray'"


HOOKS = """
import attrs
from plait import hookimpl

@attrs.define
class Ghost:
    @hookimpl
    def {signature}:
        {body}
"""


def test_an_exception_names_plugin_and_hook(folder):
    distribution(folder, "plait-bad", code=HOOKS.format(signature="parallelize(self, model)", body="model.wieght"))
    hooks = Hooks({"fine": create("fine", {}), "ghost": create("ghost", {})})
    with pytest.raises(AttributeError, match="wieght") as caught:
        hooks.fold("parallelize", "ghost", "model", model=object())
    assert caught.value.__notes__ == ["raised by strategy 'ghost' (plait-bad 1.0) in its hook 'parallelize'"]


def test_a_hook_that_does_not_exist(folder):
    distribution(folder, "plait-bad", code=HOOKS.format(signature="build_meshes(self)", body="return []"))
    refused(
        "strategy 'ghost' (plait-bad 1.0) does not fit the hooks of API 1: ",
        lambda: Hooks({"ghost": create("ghost", {})}),
    )


@pytest.mark.parametrize("answer", ["None", "MeshAxis('ghost')", "['ghost']", "7"])
def test_an_answer_that_is_no_mesh(folder, answer):
    code = "from plait import MeshAxis\n" + HOOKS.format(signature="build_mesh(self)", body=f"return {answer}")
    distribution(folder, "plait-bad", code=code)
    ghost = {"ghost": create("ghost", {})}
    assembly = Assembly(nn.Identity(), Run(Config(), 1, "cpu", ModelSpec(axes={}), 0, ghost))
    for part in (
        "strategy 'ghost' (plait-bad 1.0) returned ",
        " from its hook 'build_mesh', which must return a list of MeshAxis and MeshView",
    ):
        refused(part, lambda: assembly.layout)
