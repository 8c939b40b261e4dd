"""A strategy that misbehaves is the one that is named, in one sentence."""

import os
import re

import pytest
import torch
from torch import nn

from plait import ModelSpec, PlaitError, apply
from plait.contract.batch import Batch
from plait.strategies.probe import probe
from plait.strategies.registry import create
from plait.system.errors import one_line
from plait.system.signals import Stopped
from plait_testing.project import STARTED
from tests.helpers.fakes import distribution, forget

GHOST = r"strategy 'ghost' \(plait-bad 1\.0\)"
CODE = """
import attrs, os, sys, torch
from plait import MeshAxis, MeshView, hookimpl
{top}
@attrs.define
class Ghost:
    {attribute}
    @hookimpl
    def build_mesh(self):
        {mesh}
    {hook}
"""


@pytest.fixture
def ghost(tmp_path, monkeypatch):
    """Write the strategy `ghost` with these lines of code."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))

    def write(signature="", body="pass", mesh="return []", top="", attribute="phase = 'runtime'"):
        hook = f"@hookimpl\n    def {signature}:\n        {body}" if signature else ""
        code = CODE.format(top=top, mesh=mesh, attribute=attribute, hook=hook)
        distribution(tmp_path, "plait-bad", code=code)

    yield write
    forget(tmp_path)


def one_sentence(plait_project, sentence):
    done = plait_project("train", "strategy=[ghost]", "model.n_layers=1", "launch.device=cpu")
    assert done.code == 1, done
    assert re.fullmatch(f"plait: {sentence}\n", done.err), done.err


def refused(sentence, act):
    with pytest.raises(Exception) as caught:
        act()
    assert re.fullmatch(sentence, one_line(caught.value)), one_line(caught.value)


@pytest.fixture
def alone(monkeypatch):
    """A process group of this process alone, for `live`."""
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def live():
    """A model under `ghost`, after its backward."""
    model = nn.Linear(2, 2)
    applied = apply(model, ModelSpec(axes={"weight": ("o", "i"), "bias": ("o",)}), [create("ghost", {})])
    model(torch.ones(1, 2)).sum().backward()
    return applied


RESERVED = "{'a': torch.ones(1), 'replica.a': torch.ones(1)}"
# hook -> what it must return, and what it returns instead
WRONG = {
    "parallelize(self, model)": ("a torch module, or None", ["5", "'model'", "[model]", "type(model)"]),
    "compile(self, model)": ("a torch module, or None", ["5", "'model'", "[model]", "type(model)"]),
    "clip_grads(self, parameters)": (
        "the total norm",
        ["'norm'", "torch.ones(2)", "torch.zeros(0)", "[1.0]", "True", "torch.tensor(1j)", "parameters"],
    ),
    "deal(self, tokens)": (
        "tokens, labels and",
        [
            *("5", "tokens", "[tokens] * 3", "(tokens,) * 2", "(tokens,) * 4", "(tokens, tokens, 1)"),
            *("(tokens, tokens, tokens[:1])", "{1: tokens, 2: tokens, 3: tokens}"),
        ],
    ),
    "checkpoint(self, model)": (
        "a dict of tensors by name",
        ["5", "{'a': 1}", "{1: torch.ones(1)}", "model", "({}, 5)", "(None, print)", "({}, print, 3)", "[]", RESERVED],
    ),
}


def asked(applied):
    applied.deal(Batch(torch.ones(3, 4), torch.ones(3, 4)))
    applied.clip_grads(1.0)
    applied.checkpoint()


@pytest.mark.parametrize(("hook", "answer"), [(hook, answer) for hook, (_, found) in WRONG.items() for answer in found])
def test_no_answer(ghost, alone, hook, answer):
    ghost(hook, f"return {answer}")
    said = rf"{GHOST} returned .* from its hook '{hook.partition('(')[0]}', which must return {WRONG[hook][0]}"
    with pytest.raises(PlaitError, match=said):
        asked(live())


def test_a_part_of_a_row_has_positions(ghost, alone):
    ghost("deal(self, tokens)", "return tokens[:, :2], tokens[:, :2], None")
    with pytest.raises(PlaitError, match=rf"{GHOST} returned a part of the tokens from its hook 'deal' without pos"):
        asked(live())


def test_a_module_is_an_answer(ghost, alone):
    ghost("parallelize(self, model)", "return model", attribute="phase = 'model'")
    assert isinstance(live().parts[0], nn.Linear)


@pytest.mark.parametrize(
    ("mesh", "said"),
    [
        ("return None", "returned None from its hook 'build_mesh', which must return a list .*"),
        ("return MeshAxis('x', 1)", "returned MeshAxis.* from its hook 'build_mesh', which must return a list .*"),
        ("return {'x': 1}", "returned {'x': 1} from its hook 'build_mesh', which must return a list .*"),
        ("return [MeshAxis('x', 'two')]", "TypeError: the degree of a mesh axis must be a whole number, not 'two'"),
        ("return [MeshAxis('x', 2.0)]", "TypeError: the degree of a mesh axis must be a whole number, not 2.0"),
        ("return [MeshAxis(3)]", "TypeError: the name of a mesh axis or view must be text, not 3"),
        ("return [MeshView('x', ['y'])]", "TypeError: the axes of a mesh view must be of MeshAxis, not 'y'"),
        ("yield 1 / 0", "ZeroDivisionError: division by zero"),
    ],
)
def test_a_mesh_of_garbage(ghost, alone, mesh, said):
    ghost(mesh=mesh)
    named = rf"{said} \(raised by {GHOST} in its hook 'build_mesh'\)"
    refused(rf"{GHOST} {said}" if said.startswith("returned") else named, live)


def test_axes_may_come_one_by_one(ghost, alone):
    ghost(mesh="yield MeshAxis('x', 1)")
    assert [axis.name for axis in live().mesh.layout.dense] == ["x"]


LEAVES = [
    ("sys.exit(3)", r"calls sys\.exit\(3\)"),
    ("sys.exit()", r"calls sys\.exit\(None\)"),
    ("raise GeneratorExit", r"raises GeneratorExit"),
    ("raise type('Odd', (BaseException,), {})()", "raises Odd"),
]


@pytest.mark.parametrize(("code", "said"), LEAVES)
def test_it_leaves_when_it_is_imported(ghost, code, said):
    ghost(top=code)
    refused(rf"{GHOST} cannot be imported from plait_bad:Ghost: it {said}", lambda: create("ghost", {}))


@pytest.mark.parametrize(("code", "said"), LEAVES)
@pytest.mark.parametrize("hook", ["configure", "parallelize"])
def test_it_leaves_in_a_hook(ghost, alone, hook, code, said):
    ghost(f"{hook}(self)", code)
    refused(rf"{GHOST} {said} in its hook '{hook}'", live)


@pytest.mark.parametrize(("code", "said"), [LEAVES[0], ("raise KeyboardInterrupt", "raises KeyboardInterrupt")])
def test_on_the_command_line(plait_project, ghost, code, said):
    ghost(top=code)
    one_sentence(plait_project, rf"{GHOST} cannot be imported from plait_bad:Ghost: it {said}")


def test_a_signal_is_no_fault_of_its_own(ghost, alone):
    ghost("parallelize(self)", "from plait.system.signals import Stopped; raise Stopped(15)")
    with pytest.raises(Stopped):
        live()


@pytest.mark.parametrize("attribute", ["before = 5", "after = 'fsdp2'", "claims = [3]"])
def test_attributes_that_are_no_names(ghost, alone, attribute):
    ghost(attribute=attribute)
    refused(rf"{GHOST} has {attribute.replace('[', '.').replace(']', '.')}, which must be a tuple of names", live)


def test_options_that_make_it_fail(ghost):
    ghost(attribute="x: int = attrs.field(default=1, validator=lambda *_: 1 / 0)")
    why = "ZeroDivisionError: division by zero"
    refused(rf"{GHOST} cannot be created from its options: {why}", lambda: create("ghost", {}))


def test_what_it_prints_harms_nothing(plait_project, ghost, monkeypatch):
    ghost(top="print('hello'); print('{', file=sys.stderr)\nimport atexit; atexit.register(print, 'bye')")
    done = plait_project("train", "strategy=[ghost]", "launch.device=cpu")
    assert (done.code, "hello\n" in done.out) == (STARTED, True)
    monkeypatch.setenv("PYTHONPATH", os.getcwd())
    assert probe("ghost")["hooks"] == ["build_mesh"]


# Hooks of a training step


@pytest.mark.parametrize("answer", ["torch.tensor([2.0])", "2", "2.0", "torch.tensor(2.0)", "None"])
def test_a_norm(ghost, alone, answer):
    ghost("clip_grads(self)", f"return {answer}")
    norm = live().clip_grads(1e9)
    assert (norm.shape, float(norm)) == ((), pytest.approx(2.0 if answer != "None" else 6**0.5))  # then the core's


@pytest.mark.parametrize("answer", ["state", "(state, None)", "(state, print)"])
def test_a_state(ghost, alone, answer):
    ghost("checkpoint(self, model)", f"state = {{'a': torch.ones(1)}}; return {answer}")
    assert list(live().checkpoint()[0]) == ["a"]
