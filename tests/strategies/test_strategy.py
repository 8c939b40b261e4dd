"""Order, roles and hooks of strategies, with classes that no package installs."""

import attrs
import pytest

from plait.contract.errors import PlaitError
from plait.contract.hookspecs import hookimpl
from plait.strategies.hooks import Hooks
from plait.strategies.order import order
from plait.testing import raises_about


def strategy(phase="runtime", before=(), after=(), claims=(), **body):
    plain = {"phase": phase, "before": before, "after": after, "claims": claims, **body}
    return attrs.define(type("Some", (), plain), slots=False)()


def names(**strategies):
    return [turn.name for turn in order(strategies)]


def test_phase_comes_first_then_wishes_then_name():
    assert names(z=strategy("model"), a=strategy(), m=strategy("graph"), b=strategy()) == ["z", "m", "a", "b"]
    assert names(a=strategy(after=("b",)), b=strategy()) == ["b", "a"]
    assert names(a=strategy(), b=strategy(before=("a",))) == ["b", "a"]
    assert names(a=strategy(after=("not selected",)), b=strategy()) == ["a", "b"]


def test_the_reason_is_told():
    turns = {p.name: p.reason for p in order({"a": strategy(after=("b",)), "b": strategy(before=("a",))})}
    assert turns["a"] == "phase runtime; after b, as it asks; after b, as b asks"
    turns = {p.name: p.reason for p in order({"a": strategy(), "b": strategy()})}
    assert turns == dict.fromkeys("ab", "phase runtime; by name")


def test_a_cycle_names_its_members():
    with pytest.raises(PlaitError, match=r"each want to act before the other: (a -> b|b -> a)"):
        names(a=strategy(before=("b",)), b=strategy(before=("a",)))
    with pytest.raises(PlaitError, match="each want to act before the other"):
        names(a=strategy("model", after=("b",)), b=strategy("runtime"))


def test_an_unknown_phase_is_named():
    with raises_about("phase", "late", ("model", "graph", "runtime")):
        names(a=strategy("late"))


def test_two_claims_of_one_role_are_refused():
    role = ("parameter_sharding",)
    with raises_about("strategy", ("a", "b")):
        Hooks({"a": strategy(claims=role), "b": strategy(claims=role)})


def hook(name, answer=None, arguments="model"):
    code = f"def {name}(self, {arguments}):\n    return answer"
    scope = {"answer": answer}
    exec(code, scope)  # pluggy reads the names of arguments off the function
    return {name: hookimpl(scope[name])}


def test_two_first_result_hooks_are_refused_naming_both():
    with raises_about("strategy", ("a", "b")):
        Hooks({"a": strategy(**hook("compile")), "b": strategy(**hook("compile"))})


def test_a_hook_that_is_switched_off_does_not_count():
    off = strategy(hooks_off=("compile",), **hook("compile", "off's"), **hook("export", "its", "state"))
    hooks = Hooks({"a": off, "b": strategy(**hook("compile", "b's"))})
    assert hooks.owners("compile") == ["b"]
    assert hooks.owners("export") == ["a"]
    assert hooks.first("compile", model=1, mesh=None, spec=None, run=None) == "b's"


def test_unknown_hooks_and_arguments_name_the_plugin():
    with pytest.raises(PlaitError, match=r"strategy 'a' does not fit the hooks of API 1: .*unknown hook 'paralelize'"):
        Hooks({"a": strategy(**hook("paralelize"))})
    with pytest.raises(PlaitError, match=r"strategy 'a' does not fit .*modle"):
        Hooks({"a": strategy(**hook("parallelize", arguments="modle"))})


def test_a_fold_goes_in_order_and_none_means_in_place():
    hooks = Hooks({"b": strategy("model", **hook("parallelize", "B")), "a": strategy(**hook("parallelize"))})
    model = "start"
    for turn in hooks.turns:
        model = hooks.fold("parallelize", turn.name, "model", model=model, mesh=None, spec=None, run=None)
    assert model == "B"


class Core:
    @hookimpl
    def compile(self, model):
        return f"core's {model}"


def test_the_core_answers_what_no_strategy_does():
    arguments = {"model": 1, "mesh": None, "spec": None, "run": None}
    own = {"a": strategy(**hook("compile", "own"))}
    assert Hooks({}, defaults=Core()).first("compile", **arguments) == "core's 1"
    assert Hooks(own, defaults=Core()).first("compile", **arguments) == "own"
    assert Hooks({"a": strategy(**hook("compile"))}, defaults=Core()).first("compile", **arguments) == "core's 1"
    assert not Hooks({}, defaults=Core()).implemented("compile")


def test_a_strategy_stays_as_its_author_made_it():
    one = strategy(**hook("compile", "own"))
    before = one.compile.__func__
    Hooks({"a": one})
    assert one.compile.__func__ is before


def test_calls_are_traced_where_asked(monkeypatch, capsys):
    monkeypatch.setenv("PLAIT_TRACE_PLUGINS", "1")
    Hooks({"a": strategy(**hook("parallelize"))}).fold("parallelize", "a", "model", model=1)
    assert "[plait] a.parallelize" in capsys.readouterr().out
