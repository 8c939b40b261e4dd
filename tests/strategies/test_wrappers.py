"""Which hooks take pluggy's wrappers, in which order they act, what they get, and what they must return."""

import contextlib

import attrs
import pytest
import torch

from plait import Batch, PlaitError
from plait.contract import hookspecs
from plait.contract.hookspecs import FIRST_RESULT, hookimpl
from plait.parallel.answers import ANSWERS
from plait.strategies.hooks import Hooks
from plait.testing import Trial, batch, raises_about

ALL = [name for name, hook in vars(hookspecs).items() if hasattr(hook, "plait_spec")]
CLIP = {"parameters": [], "max_norm": 1.0, "mesh": None, "norm_type": 2.0}


def marked(function, hook="clip_grads", name="a", **mark):
    """Name -> a strategy with this one hook."""
    body = {"anything": hookimpl(function, specname=hook, **mark), "__doc__": name}
    return {name: attrs.define(type("Some", (), body), slots=False)()}


def around(before="", after=""):
    """A wrapper that writes down when it acts."""

    def wrapper(self, max_norm):
        seen.append(f"{self.__doc__} before")
        answer = yield
        seen.append(f"{self.__doc__} after {answer}")
        return answer

    return wrapper


seen: list[str] = []


class Core:
    @hookimpl
    def clip_grads(self, max_norm):
        return max_norm / 2


def clipped(strategies, required=None):
    return Hooks(strategies, required, Core()).first("clip_grads", **CLIP)


@pytest.mark.parametrize("hook", ALL)
def test_only_first_result_hooks_take_wrappers(hook):
    def wrapper(self):
        return (yield)

    strategies = marked(wrapper, hook, wrapper=True)
    if hook in FIRST_RESULT:
        hooks = Hooks({**strategies, **marked(lambda self: 1, hook, "b")})
        assert (hooks.implemented(hook), hooks.owners(hook)) == (["a", "b"], ["b"])  # a wrapper owns no hook
    else:
        with raises_about(hook, "wrapper=True", FIRST_RESULT):
            Hooks(strategies)


@pytest.mark.parametrize(
    ("mark", "wraps"), [("hookwrapper", True), ("tryfirst", False), ("trylast", False)], ids=lambda x: str(x)
)
@pytest.mark.parametrize("hook", ["clip_grads", "after_step"])
def test_marks_that_no_hook_takes(mark, wraps, hook):
    """The core would be asked before a strategy whose hook is marked trylast."""

    def wrapper(self):
        yield

    with raises_about(hook, f"{mark}=True"):
        Hooks(marked(wrapper if wraps else lambda self: 1, hook, **{mark: True}))


def test_the_first_strategy_is_the_outermost_and_marks_come_before_that():
    def own(self):
        seen.append("own")
        return 7

    seen.clear()
    strategies = marked(own, name="e")
    for name, mark in {"a": {}, "b": {}, "c": {"tryfirst": True}, "d": {"trylast": True}}.items():
        strategies |= marked(around(), name=name, wrapper=True, **mark)
    assert clipped(strategies) == 7
    assert seen == [*(f"{n} before" for n in "cabd"), "own", *(f"{n} after 7" for n in "dbac")]


def test_a_wrapper_that_is_switched_off_does_not_act():
    strategies = marked(around(), wrapper=True)
    type(strategies["a"]).hooks_off = ("clip_grads",)
    seen.clear()
    assert (clipped(strategies), seen) == (0.5, [])


def doubles(self):
    return 2 * (yield)


def mends(self):
    try:
        return (yield)
    except ZeroDivisionError:
        return 3.0


def fails(self):
    return 1 / 0


def test_a_wrapper_answers_in_the_place_of_what_it_wraps():
    assert clipped(marked(doubles, wrapper=True)) == 1.0  # of the core's
    assert clipped(marked(doubles, wrapper=True) | marked(lambda self: 4, name="b")) == 8
    assert clipped(marked(doubles, wrapper=True) | marked(lambda self: None, name="b")) == 1.0
    assert clipped(marked(mends, wrapper=True) | marked(fails, name="b")) == 3.0


def forgets(self):
    yield


def mutes(self):
    with contextlib.suppress(ZeroDivisionError):
        yield


def spoils(self):
    yield
    return "spoilt"


def never(self, max_norm):
    if max_norm > 9:
        yield


def twice(self):
    yield
    yield


WRONG = [
    (forgets, [], "returned None"),
    (mutes, [fails], "returned None"),
    (spoils, [], "returned 'spoilt' from its hook 'clip_grads'"),
    (never, [], "did not yield"),
    (twice, [], "yielded twice"),
]


@pytest.mark.parametrize(("wrapper", "inner", "why"), WRONG, ids=lambda x: getattr(x, "__name__", None))
def test_a_wrapper_that_answers_wrongly_is_named(wrapper, inner, why):
    strategies = marked(wrapper, wrapper=True) | {k: v for f in inner for k, v in marked(f, name="b").items()}
    with pytest.raises(PlaitError, match=f"^strategy 'a' .*{why}"):
        clipped(strategies, ANSWERS)


def test_a_wrapper_is_a_generator():
    with pytest.raises(PlaitError, match="strategy 'a' wraps the hook 'clip_grads' and has no `yield`"):
        Hooks(marked(lambda self: 1, wrapper=True))


def raises_afterwards(self):
    yield
    raise LookupError


@pytest.mark.parametrize(
    ("strategies", "error", "whose"),
    [
        (marked(raises_afterwards, wrapper=True), LookupError, "a"),
        (marked(doubles, wrapper=True) | marked(fails, name="b"), ZeroDivisionError, "b"),
        (marked(doubles, wrapper=True), TypeError, ""),  # the core's: max_norm is None
    ],
)
def test_an_error_that_passes_through_a_wrapper_is_not_its_own(strategies, error, whose):
    with pytest.raises(error) as caught:
        Hooks(strategies, defaults=Core()).first("clip_grads", **{**CLIP, "max_norm": 1 if whose else None})
    notes = [f"raised by strategy {whose!r} in its hook 'clip_grads'"] if whose else []
    assert getattr(caught.value, "__notes__", []) == notes


def everywhere():
    """(a strategy that wraps every hook that takes wrappers, what each got)."""
    got: dict[str, list[str]] = {hook: [] for hook in FIRST_RESULT}

    def wrapper(hook):
        def around(self):
            answer = yield
            got[hook].append(type(answer).__name__)
            return answer

        return around

    body = {f"around_{hook}": hookimpl(wrapper(hook), specname=hook, wrapper=True) for hook in FIRST_RESULT}
    return attrs.define(type("Everywhere", (), body), slots=False)(), got


def trained(wrapped):
    """(parameters after two steps, what wrappers got)."""
    trial, (strategy, got) = Trial(), everywhere()
    applied = trial.apply({}, [strategy] if wrapped else [])
    optimizer = applied.optimizer(trial.optimizer)
    for step in range(2):
        applied.step(Batch(*batch(step)), optimizer, max_norm=1.0)
    applied.checkpoint(optimizer)
    applied.export({})
    applied.hooks.first("plan_stages", model=None, spec=None, run=None, micro=1)
    if wrapped:
        with pytest.raises(PlaitError, match="strategy 'everywhere' makes the run's optimizer"):
            applied.step(Batch(*batch(2)), trial.optimizer(applied.groups()), max_norm=1.0)
    return [param.detach() for param in applied.parameters()], got


def test_what_each_wrapper_gets_and_that_it_changes_nothing(plait_ranks):
    ((plain, _),) = plait_ranks.run(trained, False, world=1)
    ((wrapped, got),) = plait_ranks.run(trained, True, world=1)
    assert all(torch.equal(one, other) for one, other in zip(plain, wrapped, strict=True))
    assert got == {
        "compile": ["Llama3"],
        "deal": ["tuple"] * 2,
        "forward_backward": ["bool"] * 2,
        "plan_stages": ["NoneType"],
        "optimizer": ["AdamW"],
        "checkpoint": ["tuple"],
        "export": ["NoneType"],  # no strategy answered, and the core's own comes after wrappers
        "clip_grads": ["Tensor"] * 2,
    }


def stolen():
    @attrs.define
    class Thief:
        @hookimpl(wrapper=True)
        def forward_backward(self, inputs):
            next(iter(inputs))
            return (yield)

    trial = Trial()
    applied = trial.apply({}, [Thief()])
    try:
        applied.forward_backward(Batch(*batch(0)).split(4), 100)
    except PlaitError as error:
        return str(error)


def test_a_wrapper_that_takes_a_micro_batch_away_is_refused(plait_ranks):
    (sentence,) = plait_ranks.run(stolen, world=1)
    assert sentence.startswith("strategy 'thief' called the loss for the micro-batches [0] instead of [0, 1]")
