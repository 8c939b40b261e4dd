"""Order, roles and hooks of strategies, with classes that no package installs."""

import attrs
import pytest

from plait.contract.errors import PlaitError
from plait.contract.hookspecs import hookimpl
from plait.strategies.hooks import Braid
from plait.strategies.order import order


def strategy(stage="runtime", before=(), after=(), claims=(), **body):
    plain = {"stage": stage, "before": before, "after": after, "claims": claims, **body}
    return attrs.define(type("Some", (), plain), slots=False)()


def names(**strategies):
    return [place.name for place in order(strategies)]


def test_stage_comes_first_then_wishes_then_name():
    assert names(z=strategy("model"), a=strategy(), m=strategy("graph"), b=strategy()) == ["z", "m", "a", "b"]
    assert names(a=strategy(after=("b",)), b=strategy()) == ["b", "a"]
    assert names(a=strategy(), b=strategy(before=("a",))) == ["b", "a"]
    assert names(a=strategy(after=("not selected",)), b=strategy()) == ["a", "b"]


def test_the_reason_is_told():
    places = {p.name: p.reason for p in order({"a": strategy(after=("b",)), "b": strategy(before=("a",))})}
    assert places["a"] == "stage runtime; after b, as it asks; after b, as b asks"


def test_a_cycle_names_its_members():
    with pytest.raises(PlaitError, match=r"each want to act before the other: (a -> b|b -> a)"):
        names(a=strategy(before=("b",)), b=strategy(before=("a",)))
    with pytest.raises(PlaitError, match="each want to act before the other"):
        names(a=strategy("model", after=("b",)), b=strategy("runtime"))


def test_an_unknown_stage_is_named():
    with pytest.raises(PlaitError, match="strategy 'a' acts at stage 'late'; the stages are model, graph, runtime"):
        names(a=strategy("late"))


def test_two_claims_of_one_role_are_refused():
    role = ("parameter_sharding",)
    with pytest.raises(PlaitError, match="'a' and 'b' both claim the role 'parameter_sharding'"):
        Braid({"a": strategy(claims=role), "b": strategy(claims=role)})


def hook(name, answer=None, arguments="model"):
    code = f"def {name}(self, {arguments}):\n    return answer"
    scope = {"answer": answer}
    exec(code, scope)  # pluggy reads the names of arguments off the function
    return {name: hookimpl(scope[name])}


def test_two_first_result_hooks_are_refused_naming_both():
    with pytest.raises(PlaitError, match="'a' and 'b' both implement 'compile', which only one may"):
        Braid({"a": strategy(**hook("compile")), "b": strategy(**hook("compile"))})


def test_unknown_hooks_and_arguments_name_the_plugin():
    with pytest.raises(PlaitError, match=r"strategy 'a' does not fit the hooks of API 1: .*unknown hook 'paralelize'"):
        Braid({"a": strategy(**hook("paralelize"))})
    with pytest.raises(PlaitError, match=r"strategy 'a' does not fit .*modle"):
        Braid({"a": strategy(**hook("parallelize", arguments="modle"))})


def test_a_fold_goes_in_order_and_none_means_in_place():
    braid = Braid({"b": strategy("model", **hook("parallelize", "B")), "a": strategy(**hook("parallelize"))})
    model = "start"
    for place in braid.places:
        model = braid.fold("parallelize", place.name, "model", model=model, mesh=None, spec=None, run=None)
    assert model == "B"


def test_a_wrapper_around_a_fold_is_refused():
    def parallelize(self, model):
        return (yield)

    with pytest.raises(PlaitError, match="strategy 'a' wraps the hook 'parallelize'; a fold takes no wrappers"):
        Braid({"a": strategy(parallelize=hookimpl(wrapper=True)(parallelize))})


def test_an_error_names_plugin_and_hook():
    def parallelize(self, model):
        raise ValueError("no")

    braid = Braid({"a": strategy(parallelize=hookimpl(parallelize))})
    with pytest.raises(ValueError, match="no") as caught:
        braid.fold("parallelize", "a", "model", model=None)
    assert caught.value.__notes__ == ["raised by strategy 'a' in its hook 'parallelize'"]


def test_defaults_answer_where_nobody_does():
    arguments = {"model": 1, "mesh": None, "spec": None, "run": None}
    assert Braid({}).first("compile", lambda **a: "default", **arguments) == "default"
    assert Braid({"a": strategy(**hook("compile", "own"))}).first("compile", lambda **a: 0, **arguments) == "own"


def test_calls_are_traced_where_asked(monkeypatch, capsys):
    monkeypatch.setenv("PLAIT_TRACE_PLUGINS", "1")
    Braid({"a": strategy(**hook("parallelize"))}).fold("parallelize", "a", "model", model=1)
    assert "[plait] a.parallelize" in capsys.readouterr().out
